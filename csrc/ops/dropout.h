// Dropout's mask of a row, eight Philox blocks (64 columns) at a time. The bits are ops/reference/dropout.py's.

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "rows.h"

namespace maelm {

using DropoutKeys = std::array<std::array<int32_t, 2>, kDropoutRounds>;  // of Philox's rounds

// What draws the masks of one call: rate, seed and site. Off at a rate of 0.
class Dropout {
 public:
  Dropout(double p, const std::optional<Tensor>& seed, int64_t place, const char* op);

  bool on() const { return on_; }
  float scale() const { return scale_; }
  // Bytes of 0 or 255 for `width` columns of `row` from `first` on, a multiple of 8; the buffer has buffer_size(width) of
  // them. part: a head, in attention.
  void draw(uint8_t* bytes, int64_t row, int64_t width, int64_t part = 0, int64_t first = 0) const;
  // The same for the attention weights of a query (its packed row) in one head, in the order of the keys; `first` is a
  // multiple of 32.
  void draw_weights(uint8_t* bytes, int64_t row, int64_t keys, int64_t head, int64_t first = 0) const;
  // draw_weights's in a bit each, in bits_size(keys) bytes; only for a CPU with AVX-512.
  void draw_bits(uint8_t* bits, int64_t row, int64_t keys, int64_t head, int64_t first) const;
  static size_t bits_size(int64_t keys) { return static_cast<size_t>(ceil_div(keys, 128) * 16); }
  static size_t buffer_size(int64_t width) { return static_cast<size_t>(ceil_div(width, 64) * 64); }

 private:
  bool on_ = false;
  float scale_ = 1.0f;
  uint32_t threshold_ = 0, place_ = 0;
  uint64_t seed_ = 0;
  DropoutKeys keys_ = {};
};

// A thread's mask buffer.
class Mask {
 public:
  Mask(const Dropout& dropout, int64_t width)
      : dropout_(dropout), width_(width), bytes_(dropout.on() ? Dropout::buffer_size(width) : 0) {}
  Dropped of(int64_t row) {
    if (!dropout_.on()) return {};
    dropout_.draw(bytes_.data(), row, width_);
    return {bytes_.data(), dropout_.scale()};
  }

 private:
  const Dropout& dropout_;
  int64_t width_;
  std::vector<uint8_t> bytes_;
};

// out[row] = dropout(layer_norm(what sources.read gives for row)), and the row's mean and rstd.
template <class Sources>
void write_norms(const Sources& sources, int64_t rows, int64_t width, double eps, const Tensor& weight,
                 const Tensor& bias, const Dropout& dropout, const Tensor& out, const Tensor& mean,
                 const Tensor& rstd) {
  const Rows to(out);
  const auto* w = static_cast<const float*>(weight.data_ptr());
  const auto* b = static_cast<const float*>(bias.data_ptr());
  auto* means = static_cast<float*>(mean.data_ptr());
  auto* rstds = static_cast<float*>(rstd.data_ptr());
  torch::stable::parallel_for(0, rows, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> x(width), first(width), second(width);
    Mask mask(dropout, width);
    for (int64_t row = begin; row < end; ++row) {
      sources.read(x.data(), row, first.data(), second.data());
      const Moments m = moments(x.data(), width, eps);
      normalise(to, row, x.data(), m, w, b, mask.of(row), width);
      means[row] = m.mean;
      rstds[row] = m.rstd;
    }
  });
}

}  // namespace maelm
