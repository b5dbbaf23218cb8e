// The samples of a token store, read from its mapped files.

#pragma once

#include <cstdint>
#include <vector>

namespace maelm {

// Does not own what it reads. Samples are numbered from 0 through the record batches, in the order they were added.
class Samples {
 public:
  explicit Samples(int64_t token_bytes) : token_bytes_(token_bytes) {}

  // A record batch of `rows` samples: sample r is tokens offsets[r] .. offsets[r + 1] - 1 of `size` tokens.
  void add(const void* tokens, int64_t size, const int32_t* offsets, int64_t rows);

  int64_t count() const { return starts_.back(); }

  // lengths[i]: tokens of samples[i], each in [0, count()). Returns the first i whose offsets cannot be, or -1.
  int64_t lengths(const int64_t* samples, int64_t count, int64_t* lengths) const;

  // Copies the samples one after another. What `lengths` found wrong must not be read; out has room for the sum.
  void read(const int64_t* samples, int64_t count, void* out) const;

 private:
  struct Batch {
    const char* tokens;
    int64_t size;
    const int32_t* offsets;
  };
  struct Span {
    const Batch* batch;
    int64_t first, end;  // tokens
  };
  Span find(int64_t sample) const;

  int64_t token_bytes_;
  std::vector<Batch> batches_;
  std::vector<int64_t> starts_ = {0};  // of each batch its first sample, and of all the number
};

}  // namespace maelm
