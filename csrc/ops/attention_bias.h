// The bias of attention by distance, on the CPU: looked up as the scores are made, so that nothing is written out for
// all pairs. Removed tokens leave gaps between the positions of neighbouring keys.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "panels.h"
#include "tensors.h"
#include "vec.h"

namespace maelm {

// The bias of every distance between the positions of a batch, per head: line, with its ends drawn out.
class Distances {
 public:
  Distances(const std::optional<Tensor>& line, const Tensor& q_positions, const Tensor& k_positions)
      : reach_(line.has_value() ? line->size(1) / 2 : 0) {
    if (!line.has_value() || q_positions.size(0) == 0 || k_positions.size(0) == 0) return;
    const auto ends = [](const Tensor& positions) {
      const auto* p = static_cast<const int32_t*>(positions.data_ptr());
      const auto [low, high] = std::minmax_element(p, p + positions.size(0));
      return std::pair<int64_t, int64_t>(*low, *high);
    };
    const auto [q_low, q_high] = ends(q_positions);
    const auto [k_low, k_high] = ends(k_positions);
    require(q_low >= 0 && k_low >= 0 && std::max(q_high, k_high) < kMost,
            "attention: with a bias, positions must lie in [0, ", kMost, ")");
    least_ = k_low - q_high;
    width_ = k_high - q_low - least_ + 1;
    stride_ = padded(width_) + 2 * kPanel;  // a span may read 31 past the last distance
    const Tensor values = fp32(*line);
    const auto* from = static_cast<const float*>(values.data_ptr());
    const auto excluded = [&](int64_t at) {
      for (int64_t head = 0; head < line->size(0); ++head) {
        if (from[head * (2 * reach_ + 1) + at] != -std::numeric_limits<float>::infinity()) return false;
      }
      return true;
    };
    int64_t first = 0, last = 2 * reach_;
    while (first <= last && excluded(first)) ++first;
    while (first <= last && excluded(last)) --last;
    if (first > 0) nearest_ = first - reach_;
    if (last < 2 * reach_) farthest_ = last - reach_;
    data_.resize(static_cast<size_t>(line->size(0) * stride_));
    for (int64_t head = 0; head < line->size(0); ++head) {
      for (int64_t i = 0; i < stride_; ++i) data_[head * stride_ + i] = from[head * (2 * reach_ + 1) + place(i)];
    }
  }

  // Of a head: the bias of key position k and query position q is row[k - q - least()].
  const float* row(int64_t head) const { return data_.data() + head * stride_; }
  int64_t least() const { return least_; }
  // Every head excludes the distances below nearest() and those above farthest(), with -inf.
  int64_t nearest() const { return nearest_; }
  int64_t farthest() const { return farthest_; }
  bool limited() const { return nearest_ > -kMost || farthest_ < kMost; }
  int64_t stride() const { return stride_; }
  // Adds what belongs to every distance, (stride(),), to what belongs to the line's, (2R+1,).
  void fold(const float* by_distance, double* line) const {
    for (int64_t i = 0; i < width_; ++i) line[place(i)] += static_cast<double>(by_distance[i]);
  }

 private:
  static constexpr int64_t kMost = 1 << 22;
  int64_t place(int64_t i) const { return std::clamp(i + least_, -reach_, reach_) + reach_; }

  int64_t reach_, least_ = 0, width_ = 0, stride_ = 0, nearest_ = -kMost, farthest_ = kMost;
  std::vector<float> data_;
};

// Keys of a sequence, from a multiple of kPanel on.
struct Keys {
  int64_t first, count;
  int64_t width() const { return padded(count); }
};

// Which of a sequence's keys a block of queries may see, whole panels of them. They may lie in any order.
class Extents {
 public:
  void set(const int32_t* positions, int64_t keys) {
    keys_ = keys;
    panels_.clear();
    for (int64_t first = 0; first < keys; first += kPanel) {
      const auto [low, high] = std::minmax_element(positions + first, positions + std::min(first + kPanel, keys));
      panels_.emplace_back(*low, *high);
    }
  }

  // All from the first to the last panel that holds a distance within the limits; the first panel if none does.
  Keys seen(const int32_t* queries, int64_t rows, const Distances& distances) const {
    const auto [low, high] = std::minmax_element(queries, queries + rows);
    const int64_t least = *low + distances.nearest(), most = *high + distances.farthest();
    const auto sees = [&](const std::pair<int64_t, int64_t>& panel) {
      return panel.second >= least && panel.first <= most;
    };
    const auto begin = std::find_if(panels_.begin(), panels_.end(), sees);
    if (begin == panels_.end()) return {0, std::min(kPanel, keys_)};
    const auto end = std::find_if(panels_.rbegin(), panels_.rend(), sees).base();
    const int64_t first = (begin - panels_.begin()) * kPanel;
    return {first, std::min((end - panels_.begin()) * kPanel, keys_) - first};
  }

 private:
  int64_t keys_ = 0;
  std::vector<std::pair<int64_t, int64_t>> panels_;  // the least and the largest position of each
};

// Where the biases of a sequence's keys lie, eight keys at a time. As long as eight keys lie within 16 positions, their
// biases are two neighbouring Vec, permuted.
class Spans {
 public:
  void set(const int32_t* positions, int64_t keys) {
    positions_ = positions;
    keys_ = keys;
    spans_.resize(static_cast<size_t>(padded(keys) / 8));
    for (size_t i = 0; i < spans_.size(); ++i) describe(spans_[i], static_cast<int64_t>(i) * 8);
  }

  // scores[j] += row[position of key keys.first + j]; row is that of the query.
  void add(float* scores, const float* row, const Keys& keys) const {
    for (const Span *at = begin(keys), *end = at + keys.width() / 8; at != end; ++at) {
      const Span& span = *at;
      Vec bias;
      if (span.near) {
        bias = pick(row + span.base, span.at);
      } else {
        bias = Vec{};
        for (int64_t lane = 0; lane < span.count; ++lane) bias[lane] = row[span.at[lane]];
      }
      store<Vec>(scores, load<Vec>(scores) + bias);
      scores += 8;
    }
  }

  // row[position of key keys.first + j] += gradient[j]: spans take turns with two rows `apart`, since one and the next
  // overlap, and reading what was just written would wait.
  void add_back(const float* gradient, float* row, int64_t apart, const Keys& keys) const {
    for (const Span *at = begin(keys), *end = at + keys.width() / 8; at != end; ++at) {
      const Span& span = *at;
      if (span.near) {
        const Vec values = load<Vec>(gradient);
        float* to = row + span.base;
        store<Vec>(to, load<Vec>(to) + put(values, span.from[0]));
        store<Vec>(to + 8, load<Vec>(to + 8) + put(values, span.from[1]));
      } else {
        for (int64_t lane = 0; lane < span.count; ++lane) row[span.at[lane]] += gradient[lane];
      }
      gradient += 8;
      row += apart;
      apart = -apart;
    }
  }

 private:
  struct Span {
    IntVec at;       // near: what of the 16 from base on belongs to a key. Else: the key's position
    IntVec from[2];  // near: the lane of the key that each of the 16 belongs to, or -1
    int64_t base, count;
    bool near;
  };

  const Span* begin(const Keys& keys) const { return spans_.data() + keys.first / 8; }

  void describe(Span& span, int64_t first) const {
    span.count = std::clamp<int64_t>(keys_ - first, 0, 8);
    span.at = IntVec{};
    span.from[0] = span.from[1] = IntVec{} - 1;
    const int32_t* p = positions_ + first;
    span.base = span.count > 0 ? *std::min_element(p, p + span.count) : positions_[0];
    span.near = true;
    for (int64_t lane = 0; lane < span.count; ++lane) {
      const int64_t at = p[lane] - span.base;
      if (at >= 16 || span.from[at / 8][at % 8] != -1) {
        span.near = false;
        break;
      }
      span.at[lane] = static_cast<int32_t>(at);
      span.from[at / 8][at % 8] = static_cast<int32_t>(lane);
    }
    if (!span.near) {
      for (int64_t lane = 0; lane < span.count; ++lane) span.at[lane] = p[lane];
    }
  }

#ifdef __AVX2__
  static MAELM_INLINE Vec pick(const float* from, IntVec at) {
    const auto index = reinterpret_cast<__m256i>(at);
    const Vec low = _mm256_permutevar8x32_ps(load<Vec>(from), index);
    const Vec high = _mm256_permutevar8x32_ps(load<Vec>(from + 8), index);
    return at > 7 ? high : low;
  }
  static MAELM_INLINE Vec put(Vec values, IntVec from) {
    const Vec moved = _mm256_permutevar8x32_ps(values, reinterpret_cast<__m256i>(from));
    return from >= 0 ? moved : Vec{};
  }
#else
  static Vec pick(const float* from, IntVec at) {
    Vec out;
    for (int lane = 0; lane < 8; ++lane) out[lane] = from[at[lane]];
    return out;
  }
  static Vec put(Vec values, IntVec from) {
    Vec out;
    for (int lane = 0; lane < 8; ++lane) out[lane] = from[lane] >= 0 ? values[from[lane]] : 0.0f;
    return out;
  }
#endif

  const int32_t* positions_ = nullptr;
  int64_t keys_ = 0;
  std::vector<Span> spans_;
};

}  // namespace maelm
