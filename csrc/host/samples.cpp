// Random access into files that may be far larger than memory: a sample is touched twice, its offsets when lengths are
// asked for and its tokens when they are copied. Offsets come from a file, and are not trusted.

#include "samples.h"

#include <algorithm>
#include <cstring>

namespace maelm {

void Samples::add(const void* tokens, int64_t size, const int32_t* offsets, int64_t rows) {
  batches_.push_back({static_cast<const char*>(tokens), size, offsets});
  starts_.push_back(starts_.back() + rows);
}

Samples::Span Samples::find(int64_t sample) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), sample);
  const auto number = after - starts_.begin() - 1;
  const Batch& batch = batches_[number];
  const int64_t row = sample - starts_[number];
  return {&batch, batch.offsets[row], batch.offsets[row + 1]};
}

int64_t Samples::lengths(const int64_t* samples, int64_t count, int64_t* lengths) const {
  for (int64_t i = 0; i < count; ++i) {
    const Span span = find(samples[i]);
    if (span.first < 0 || span.first > span.end || span.end > span.batch->size) return i;
    lengths[i] = span.end - span.first;
  }
  return -1;
}

void Samples::read(const int64_t* samples, int64_t count, void* out) const {
  auto to = static_cast<char*>(out);
  for (int64_t i = 0; i < count; ++i) {
    const Span span = find(samples[i]);
    const int64_t bytes = (span.end - span.first) * token_bytes_;
    if (bytes > 0) std::memcpy(to, span.batch->tokens + span.first * token_bytes_, bytes);
    to += bytes;
  }
}

}  // namespace maelm
