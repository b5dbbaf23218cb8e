// One call of attention on the CPU, and a thread's scratch memory: what attention.cpp, in fp32, and attention_bf16.cpp,
// with bf16 products, share.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "attention_bias.h"
#include "dropout.h"
#include "panels.h"

namespace maelm {

constexpr const char* kOp = "attention";
constexpr int64_t kBlockBytes = 96 << 10;  // scores of a block of queries
constexpr int64_t kRowsOfWindow = 24;      // of a block in a window: more see more keys that one of them does not
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Softmax {
  float top, sum;  // the largest score, and the sum of exp(score - top)
};

// One call's tensors, checked; q, k and v are of type `type`.
struct __attribute__((visibility("hidden"))) Call {
  Tensor q, k, v;
  const int32_t *q_starts, *k_starts, *q_positions, *k_positions;
  int64_t sequences, heads, dim, longest_k = 0;
  float scale;
  Distances distances;
  bool biased;
  Dropout dropout;

  Call(ScalarType type, const Tensor& q_, const Tensor& k_, const Tensor& v_, const std::optional<Tensor>& line,
       const Tensor& q_starts_, const Tensor& k_starts_, const Tensor& q_positions_, const Tensor& k_positions_,
       double scale_, double dropout_p, const std::optional<Tensor>& seed, int64_t place)
      : q(rows(q_, "q", type)),
        k(rows(k_, "k", type)),
        v(rows(v_, "v", type)),
        q_starts(starts(q_starts_, "q_starts", q.size(0))),
        k_starts(starts(k_starts_, "k_starts", k.size(0))),
        q_positions(positions(q_positions_, "q_positions", q.size(0))),
        k_positions(positions(k_positions_, "k_positions", k.size(0))),
        sequences(q_starts_.size(0) - 1),
        heads(q.size(1)),
        dim(q.size(2)),
        scale(static_cast<float>(scale_)),
        distances(checked(line, heads), q_positions_, k_positions_),
        biased(line.has_value()),
        dropout(dropout_p, seed, place, kOp) {
    require(dim == 16 || dim == 32 || dim == 64 || dim == 128, kOp, ": head_dim must be 16, 32, 64 or 128, not ", dim);
    require(k.size(1) == heads && k.size(2) == dim && v.size(0) == k.size(0) && v.size(1) == heads && v.size(2) == dim,
            kOp, ": k and v must have shape (rows, ", heads, ", ", dim, ")");
    require(k_starts_.size(0) == q_starts_.size(0), kOp, ": queries and keys must be as many sequences");
    for (int64_t s = 0; s < sequences; ++s) longest_k = std::max(longest_k, keys(s));
  }

  int64_t queries(int64_t s) const { return q_starts[s + 1] - q_starts[s]; }
  int64_t keys(int64_t s) const { return k_starts[s + 1] - k_starts[s]; }
  // A head's rows of a sequence that starts at `row`.
  template <class T>
  static HeadOf<T> head(const Tensor& x, int64_t row, int64_t head) {
    return {static_cast<T*>(x.data_ptr()) + row * x.stride(0) + head * x.stride(1), x.stride(0)};
  }
  template <class T = float>
  HeadOf<T> queries_of(const Tensor& x, int64_t s, int64_t h) const {
    return head<T>(x, q_starts[s], h);
  }
  template <class T = float>
  HeadOf<T> keys_of(const Tensor& x, int64_t s, int64_t h) const {
    return head<T>(x, k_starts[s], h);
  }
  const float* bias_row(int64_t h, int64_t query) const {
    return distances.row(h) - distances.least() - q_positions[query];
  }

  struct Block {
    int64_t rows;
    Keys keys;
  };
  // The queries from `start` on that are computed together, `usual` of them without a window, and what they may see.
  // extents: of the sequence's keys.
  Block block(int64_t s, int64_t start, int64_t usual, const Extents& extents) const {
    const int64_t left = queries(s) - start;
    usual = std::min(usual, left);
    if (!distances.limited()) return {usual, {0, keys(s)}};
    const int64_t rows = std::min(kRowsOfWindow, left);
    const Keys seen = this->seen(s, start, rows, extents);
    if (rows * seen.width() * static_cast<int64_t>(sizeof(float)) <= kBlockBytes) return {rows, seen};
    return {usual, this->seen(s, start, usual, extents)};
  }
  // What `rows` queries from `start` on may see.
  Keys seen(int64_t s, int64_t start, int64_t rows, const Extents& extents) const {
    if (!distances.limited()) return {0, keys(s)};
    return extents.seen(q_positions + q_starts[s] + start, rows, distances);
  }

  static Tensor rows(const Tensor& x, const char* name, ScalarType type) {
    require(x.dim() == 3 && is_float(x), kOp, ": ", name,
            " must be fp32, bf16 or fp16 of shape (rows, heads, head_dim)");
    const Tensor cast = torch::stable::to(x, type);
    return cast.stride(2) == 1 ? cast : torch::stable::contiguous(cast);
  }

 private:
  static const int32_t* positions(const Tensor& x, const char* name, int64_t rows) {
    require(x.dim() == 1 && x.scalar_type() == ScalarType::Int && x.is_contiguous() && x.size(0) == rows, kOp, ": ",
            name, " must be a contiguous int32 vector of ", rows);
    return static_cast<const int32_t*>(x.data_ptr());
  }
  static const std::optional<Tensor>& checked(const std::optional<Tensor>& line, int64_t heads) {
    require(!line.has_value() ||
                (line->dim() == 2 && line->size(0) == heads && line->size(1) % 2 == 1 && is_float(*line)),
            kOp, ": line must be (heads, 2R+1), of fp32, bf16 or fp16");
    return line;
  }
  static const int32_t* starts(const Tensor& x, const char* name, int64_t rows) {
    require(x.dim() == 1 && x.scalar_type() == ScalarType::Int && x.is_contiguous() && x.size(0) > 0, kOp, ": ", name,
            " must be a contiguous int32 vector");
    const auto* p = static_cast<const int32_t*>(x.data_ptr());
    bool ascend = p[0] == 0 && p[x.size(0) - 1] == rows;
    for (int64_t s = 0; s + 1 < x.size(0); ++s) ascend = ascend && p[s] <= p[s + 1];
    require(ascend, kOp, ": ", name, " must ascend from 0 to ", rows);
    return p;
  }
};

// What a backward pass reads and writes beside the call's own tensors: grad_out, and q, k, v for their gradients, of the
// call's type and shapes; lse (heads, queries) of the forward pass.
struct __attribute__((visibility("hidden"))) BackwardTensors {
  Tensor grad_out, lse, q, k, v;
};

constexpr int64_t kPiecesOfLine = 16;
inline int64_t pieces_of_line(const Call& call) { return std::clamp<int64_t>(call.sequences, 1, kPiecesOfLine); }

// Writes the gradients of q, k and v; those of the line as (pieces, heads, line_width), to be summed over the pieces. A
// thread makes a Pass(call, tensors) and runs it for one (sequence, head) after another.
template <class Pass>
std::vector<double> each_backward(const Call& call, const BackwardTensors& tensors, int64_t line_width) {
  const int64_t pieces = pieces_of_line(call);
  std::vector<double> lines(static_cast<size_t>(pieces * call.heads * line_width));
  torch::stable::parallel_for(0, pieces * call.heads, 1, [&](int64_t begin, int64_t end) {
    Pass pass(call, tensors);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t piece = item / call.heads, last = piece_begin(piece + 1, pieces, call.sequences);
      double* to = line_width > 0 ? lines.data() + item * line_width : nullptr;
      for (int64_t s = piece_begin(piece, pieces, call.sequences); s < last; ++s) {
        pass.run(s, item % call.heads, to);
      }
    }
  });
  return lines;
}

// Memory of a thread, each piece at the start of a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : memory_(new float[static_cast<size_t>(floats + kPieces * kLine)]), next_(align(memory_.get())) {}
  float* take(int64_t floats) {
    float* piece = next_;
    next_ = align(next_ + floats);
    return piece;
  }
  uint32_t* take_words(int64_t words) { return reinterpret_cast<uint32_t*>(take(words)); }

 private:
  static constexpr int64_t kLine = 16, kPieces = 12;
  static float* align(float* p) {
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) & ~static_cast<uintptr_t>(63));
  }
  std::unique_ptr<float[]> memory_;
  float* next_;
};

}  // namespace maelm
