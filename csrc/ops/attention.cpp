// Attention over packed sequences on the CPU, forward and backward. A (sequence, head) is one piece of work: its
// keys and values are first copied into panels (panels.h); the scores of a block of queries never leave the L1 and L2
// caches. The backward pass computes them again. All of it is in fp32: bf16 and fp16 are widened before and rounded
// after. Where the bias excludes distances, a sliding window, a block of queries leaves out the keys beyond them.
//
// Everything that is summed is summed in an order that depends on the lengths alone, never on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "attention_bias.h"
#include "dropout.h"
#include "panels.h"

namespace maelm {
namespace {

constexpr const char* kOp = "attention";
constexpr int64_t kBlockBytes = 96 << 10;  // scores of a block of queries
constexpr int64_t kMostRows = 60;          // of a block
constexpr int64_t kRowsOfTiles = 12;       // rows of whole tiles, at any width of vectors
constexpr int64_t kRowsOfWindow = 24;      // of a block in a window: more see more keys that one of them does not
constexpr int64_t kPiecesOfLine = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of a block of scores that are `width` wide: whole tiles, no more than there are.
inline int64_t block_rows(int64_t rows, int64_t width) {
  const int64_t fit = kBlockBytes / static_cast<int64_t>(sizeof(float)) / std::max<int64_t>(width, 1);
  return std::min(std::clamp(fit / kRowsOfTiles * kRowsOfTiles, kRowsOfTiles, kMostRows), rows);
}

MAELM_INLINE float largest(Vec v) {
  const auto most = [&](int a, int b) { return v[b] > v[a] ? v[b] : v[a]; };
  return std::max(std::max(most(0, 4), most(1, 5)), std::max(most(2, 6), most(3, 7)));
}

struct Softmax {
  float top, sum;  // the largest score, and the sum of exp(score - top)
};

// What attention_block.h defines, for one width of vectors.
struct BlockKernels {
  using Product = void (*)(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda,
                           const float* panels, int64_t panel_step, float* out, int64_t ldc);
  Product product, product_of_transposed, add_product_of_transposed;
  Softmax (*exponentials)(float* row, int64_t keys, int64_t width);
  void (*gradients)(float* weights, float* gradient, int64_t keys, int64_t width, float lse, const uint8_t* bytes);
};

namespace narrow {
#define MAELM_LANES 8
#define MAELM_TARGET
#include "attention_block.h"
#undef MAELM_LANES
#undef MAELM_TARGET
}  // namespace narrow

#ifdef __x86_64__
namespace wide {
#define MAELM_LANES 16
#define MAELM_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "attention_block.h"
#undef MAELM_LANES
#undef MAELM_TARGET
}  // namespace wide

// The extension is compiled for AVX2; a CPU with AVX-512 runs the wider functions. PyTorch's ATEN_CPU_CAPABILITY=avx2
// turns them off here too.
const BlockKernels* widest() {
  const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has && (limit == nullptr || std::strcmp(limit, "avx512") == 0) ? &wide::kKernels : &narrow::kKernels;
}
#else
const BlockKernels* widest() { return &narrow::kKernels; }
#endif

const BlockKernels& kernels() {
  static const BlockKernels* const chosen = widest();
  return *chosen;
}

// One call's tensors, checked.
struct Call {
  Tensor q, k, v;
  const int32_t *q_starts, *k_starts, *q_positions, *k_positions;
  int64_t sequences, heads, dim, longest_k = 0;
  float scale;
  Distances distances;
  bool biased;
  Dropout dropout;

  Call(const Tensor& q_, const Tensor& k_, const Tensor& v_, const std::optional<Tensor>& line,
       const Tensor& q_starts_, const Tensor& k_starts_, const Tensor& q_positions_, const Tensor& k_positions_,
       double scale_, double dropout_p, const std::optional<Tensor>& seed, int64_t place)
      : q(rows(q_, "q")),
        k(rows(k_, "k")),
        v(rows(v_, "v")),
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
  static Head head(const Tensor& x, int64_t row, int64_t head) {
    return {static_cast<float*>(x.data_ptr()) + row * x.stride(0) + head * x.stride(1), x.stride(0)};
  }
  Head queries_of(const Tensor& x, int64_t s, int64_t h) const { return head(x, q_starts[s], h); }
  Head keys_of(const Tensor& x, int64_t s, int64_t h) const { return head(x, k_starts[s], h); }
  const float* bias_row(int64_t h, int64_t query) const {
    return distances.row(h) - distances.least() - q_positions[query];
  }

  struct Block {
    int64_t rows;
    Keys keys;
  };
  // The queries from `start` on that are computed together, and what they may see. extents: of the sequence's keys.
  Block block(int64_t s, int64_t start, const Extents& extents) const {
    const int64_t left = queries(s) - start, usual = std::min(block_rows(queries(s), padded(keys(s))), left);
    if (!distances.limited()) return {usual, {0, keys(s)}};
    const int32_t* from = q_positions + q_starts[s] + start;
    const int64_t rows = std::min(kRowsOfWindow, left);
    const Keys seen = extents.seen(from, rows, distances);
    if (rows * seen.width() * static_cast<int64_t>(sizeof(float)) <= kBlockBytes) return {rows, seen};
    return {usual, extents.seen(from, usual, distances)};
  }

  static Tensor rows(const Tensor& x, const char* name) {
    require(x.dim() == 3 && is_float(x), kOp, ": ", name,
            " must be fp32, bf16 or fp16 of shape (rows, heads, head_dim)");
    const Tensor wide = torch::stable::to(x, ScalarType::Float);
    return wide.stride(2) == 1 ? wide : torch::stable::contiguous(wide);
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

// Floats of a thread, each piece at the start of a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : memory_(new float[static_cast<size_t>(floats + kPieces * kLine)]), next_(align(memory_.get())) {}
  float* take(int64_t floats) {
    float* piece = next_;
    next_ = align(next_ + floats);
    return piece;
  }

 private:
  static constexpr int64_t kLine = 16, kPieces = 12;
  static float* align(float* p) {
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) & ~static_cast<uintptr_t>(63));
  }
  std::unique_ptr<float[]> memory_;
  float* next_;
};

// 255 in the bytes of the weights that dropout keeps, in the order of the keys.
const uint8_t* kept(std::vector<uint8_t>& bytes, const Dropout& dropout, int64_t query, const Keys& keys, int64_t head) {
  const int64_t before = keys.first % 32;  // it draws 32 at a time
  dropout.draw_weights(bytes.data(), query, before + keys.count, head, keys.first - before);
  return bytes.data() + before;
}

std::tuple<Tensor, Tensor> attention_native_fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> line,
                                                Tensor q_starts, Tensor k_starts, Tensor q_positions,
                                                Tensor k_positions, double scale, double dropout_p,
                                                std::optional<Tensor> seed, int64_t place) {
  const Call call(q, k, v, line, q_starts, k_starts, q_positions, k_positions, scale, dropout_p, seed, place);
  const int64_t dim = call.dim, total_queries = call.q.size(0);
  Tensor out = empty(q, {total_queries, call.heads, dim}, ScalarType::Float);
  Tensor lse = empty(q, {call.heads, total_queries}, ScalarType::Float);
  auto* statistics = static_cast<float*>(lse.data_ptr());
  torch::stable::parallel_for(0, call.sequences * call.heads, 1, [&](int64_t begin, int64_t end) {
    const int64_t widest = padded(call.longest_k), scores_size = std::max(kRowsOfTiles * widest, kBlockBytes / 4);
    Scratch scratch(scores_size + 2 * widest * dim);
    float* scores = scratch.take(scores_size);
    float *keys_t = scratch.take(widest * dim), *values = scratch.take(widest * dim);
    std::vector<uint8_t> bytes(call.dropout.on() ? Dropout::buffer_size(widest) : 0);
    std::vector<float> factors(kMostRows);
    Spans spans;
    Extents extents;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / call.heads, h = item % call.heads;
      const int64_t queries = call.queries(s), keys = call.keys(s), first = call.q_starts[s];
      float* lse_of = statistics + h * total_queries + first;
      const Head q_h = call.queries_of(call.q, s, h), out_h = call.queries_of(out, s, h);
      if (keys == 0) {
        for (int64_t i = 0; i < queries; ++i) {
          std::fill_n(out_h.row(i), dim, 0.0f);
          lse_of[i] = -kInfinity;
        }
        continue;
      }
      pack_rows(keys_t, call.keys_of(call.k, s, h), keys, dim, call.scale);
      pack_columns(values, call.keys_of(call.v, s, h), keys, dim, 1.0f);
      if (call.biased) spans.set(call.k_positions + call.k_starts[s], keys);
      if (call.distances.limited()) extents.set(call.k_positions + call.k_starts[s], keys);
      for (int64_t start = 0, rows; start < queries; start += rows) {
        const auto [block_size, seen] = call.block(s, start, extents);
        const int64_t width = seen.width();
        rows = block_size;
        kernels().product(rows, width, dim, q_h.row(start), q_h.stride, keys_t + seen.first * dim, dim * kPanel, scores,
                          width);
        for (int64_t r = 0; r < rows; ++r) {
          float* row = scores + r * width;
          const int64_t query = first + start + r;
          if (call.biased) spans.add(row, call.bias_row(h, query), seen);
          const Softmax softmax = kernels().exponentials(row, seen.count, width);
          if (call.biased && softmax.top == -kInfinity) {  // the bias excludes every key
            std::fill_n(row, width, 0.0f);
            lse_of[start + r] = -kInfinity;
            factors[r] = 0.0f;
            continue;
          }
          lse_of[start + r] = softmax.top + std::log(softmax.sum);
          factors[r] = call.dropout.scale() / softmax.sum;
          if (call.dropout.on()) {
            const uint8_t* keep_bytes = kept(bytes, call.dropout, query, seen, h);
            for (int64_t j = 0; j < width; j += 8) store<Vec>(row + j, keep(load<Vec>(row + j), keep_bytes + j));
          }
        }
        kernels().product(rows, dim, seen.count, scores, width, values + seen.first * kPanel, keys * kPanel,
                          out_h.row(start), out_h.stride);
        for (int64_t r = 0; r < rows; ++r) {
          float* row = out_h.row(start + r);
          for (int64_t c = 0; c < dim; c += 8) store<Vec>(row + c, load<Vec>(row + c) * factors[r]);
        }
      }
    }
  });
  return {torch::stable::to(out, q.scalar_type()), lse};
}

// What a thread of the backward pass works with, for one (sequence, head) after another.
class Backward {
 public:
  Backward(const Call& call, const Tensor& grad_out, const Tensor& lse, const Tensor& grad_q, const Tensor& grad_k,
           const Tensor& grad_v)
      : call_(call),
        grad_out_(grad_out),
        grad_q_(grad_q),
        grad_k_(grad_k),
        grad_v_(grad_v),
        lse_(static_cast<const float*>(lse.data_ptr())),
        widest_(padded(call.longest_k)),
        block_size_(std::max(kRowsOfTiles * widest_, kBlockBytes / 4)),
        scratch_(2 * block_size_ + 3 * widest_ * call.dim + 2 * kMostRows * call.dim + 2 * call.distances.stride()),
        weights_(scratch_.take(block_size_)),
        gradient_(scratch_.take(block_size_)),
        keys_t_(scratch_.take(widest_ * call.dim)),
        keys_(scratch_.take(widest_ * call.dim)),
        values_t_(scratch_.take(widest_ * call.dim)),
        queries_(scratch_.take(kMostRows * call.dim)),
        upstream_(scratch_.take(kMostRows * call.dim)),
        by_distance_(scratch_.take(2 * call.distances.stride())),
        bytes_(call.dropout.on() ? Dropout::buffer_size(widest_) : 0) {}

  // line: (2R+1,) what is added to the gradient of the head's line; null if it is not wanted.
  void run(int64_t s, int64_t h, double* line) {
    const int64_t queries = call_.queries(s), keys = call_.keys(s), dim = call_.dim;
    const Head q = call_.queries_of(call_.q, s, h);
    const Head up = call_.queries_of(grad_out_, s, h), to_q = call_.queries_of(grad_q_, s, h);
    const Head to_k = call_.keys_of(grad_k_, s, h), to_v = call_.keys_of(grad_v_, s, h);
    const bool adds = call_.distances.limited();  // not all keys are in every block
    if (keys == 0 || queries == 0 || adds) {
      for (int64_t i = 0; i < queries; ++i) std::fill_n(to_q.row(i), dim, 0.0f);
      for (int64_t j = 0; j < keys; ++j) std::fill_n(to_k.row(j), dim, 0.0f);
      for (int64_t j = 0; j < keys; ++j) std::fill_n(to_v.row(j), dim, 0.0f);
      if (keys == 0 || queries == 0) return;
    }
    const Head k = call_.keys_of(call_.k, s, h);
    pack_rows(keys_t_, k, keys, dim, call_.scale);
    pack_columns(keys_, k, keys, dim, call_.scale);
    pack_rows(values_t_, call_.keys_of(call_.v, s, h), keys, dim, call_.dropout.scale());
    if (call_.biased) spans_.set(call_.k_positions + call_.k_starts[s], keys);
    if (adds) extents_.set(call_.k_positions + call_.k_starts[s], keys);
    if (line != nullptr) std::fill_n(by_distance_, 2 * call_.distances.stride(), 0.0f);
    for (int64_t start = 0, rows; start < queries; start += rows) {
      const auto [block_size, seen] = call_.block(s, start, extents_);
      const int64_t width = seen.width(), panels = seen.first * dim;
      rows = block_size;
      kernels().product(rows, width, dim, q.row(start), q.stride, keys_t_ + panels, dim * kPanel, weights_, width);
      kernels().product(rows, width, dim, up.row(start), up.stride, values_t_ + panels, dim * kPanel, gradient_, width);
      for (int64_t r = 0; r < rows; ++r) scores_gradient(seen, s, h, start + r, r, line != nullptr);
      kernels().product(rows, dim, seen.count, gradient_, width, keys_ + seen.first * kPanel, keys * kPanel,
                        to_q.row(start), to_q.stride);
      const Head q_block = {q.row(start), q.stride}, up_block = {up.row(start), up.stride};
      pack_columns(queries_, q_block, rows, dim, call_.scale);
      pack_columns(upstream_, up_block, rows, dim, call_.dropout.scale());
      const bool first = start == 0 && !adds;
      const auto add = first ? kernels().product_of_transposed : kernels().add_product_of_transposed;
      add(seen.count, dim, rows, gradient_, width, queries_, rows * kPanel, to_k.row(seen.first), to_k.stride);
      add(seen.count, dim, rows, weights_, width, upstream_, rows * kPanel, to_v.row(seen.first), to_v.stride);
    }
    if (line != nullptr) {
      call_.distances.fold(by_distance_, line);
      call_.distances.fold(by_distance_ + call_.distances.stride(), line);
    }
  }

 private:
  // Row r of the block: scores to weights as dropout leaves them, the weights' gradient to the scores'.
  void scores_gradient(const Keys& seen, int64_t s, int64_t h, int64_t i, int64_t r, bool line) {
    const int64_t width = seen.width(), query = call_.q_starts[s] + i;
    float *weights = weights_ + r * width, *gradient = gradient_ + r * width;
    const float lse = lse_[h * call_.q.size(0) + query];
    if (lse == -kInfinity) {  // the bias excludes every key
      std::fill_n(weights, width, 0.0f);
      std::fill_n(gradient, width, 0.0f);
      return;
    }
    if (call_.biased) spans_.add(weights, call_.bias_row(h, query), seen);
    const uint8_t* bytes = call_.dropout.on() ? kept(bytes_, call_.dropout, query, seen, h) : nullptr;
    kernels().gradients(weights, gradient, seen.count, width, lse, bytes);
    if (line) {
      spans_.add_back(gradient, by_distance_ - call_.distances.least() - call_.q_positions[query],
                      call_.distances.stride(), seen);
    }
  }

  const Call& call_;
  const Tensor &grad_out_, &grad_q_, &grad_k_, &grad_v_;
  const float* lse_;
  int64_t widest_, block_size_;
  Scratch scratch_;
  float *weights_, *gradient_, *keys_t_, *keys_, *values_t_, *queries_, *upstream_, *by_distance_;
  std::vector<uint8_t> bytes_;
  Spans spans_;
  Extents extents_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_native_bwd(Tensor grad_out, Tensor q, Tensor k, Tensor v,
                                                                Tensor lse, std::optional<Tensor> line,
                                                                Tensor q_starts, Tensor k_starts, Tensor q_positions,
                                                                Tensor k_positions, bool line_gradient, double scale,
                                                                double dropout_p, std::optional<Tensor> seed,
                                                                int64_t place) {
  const Call call(q, k, v, line, q_starts, k_starts, q_positions, k_positions, scale, dropout_p, seed, place);
  grad_out = Call::rows(grad_out, "grad_out");
  require(grad_out.size(0) == call.q.size(0) && grad_out.size(1) == call.heads && grad_out.size(2) == call.dim, kOp,
          ": grad_out must have the shape of q");
  require(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() && lse.numel() == call.heads * call.q.size(0),
          kOp, ": lse must be what the forward pass returned");
  require(!line_gradient || line.has_value(), kOp, ": there is no line to differentiate by");
  const auto like = [&](const Tensor& x) { return empty(q, {x.size(0), call.heads, call.dim}, ScalarType::Float); };
  Tensor grad_q = like(call.q), grad_k = like(call.k), grad_v = like(call.v);
  const int64_t pieces = std::clamp<int64_t>(call.sequences, 1, kPiecesOfLine);
  const int64_t line_width = line_gradient ? line->size(1) : 0;
  std::vector<double> lines(static_cast<size_t>(pieces * call.heads * line_width));
  torch::stable::parallel_for(0, pieces * call.heads, 1, [&](int64_t begin, int64_t end) {
    Backward backward(call, grad_out, lse, grad_q, grad_k, grad_v);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t piece = item / call.heads, last = piece_begin(piece + 1, pieces, call.sequences);
      double* to = line_gradient ? lines.data() + item * line_width : nullptr;
      for (int64_t s = piece_begin(piece, pieces, call.sequences); s < last; ++s) {
        backward.run(s, item % call.heads, to);
      }
    }
  });
  grad_q = torch::stable::to(grad_q, q.scalar_type());
  grad_k = torch::stable::to(grad_k, k.scalar_type());
  grad_v = torch::stable::to(grad_v, v.scalar_type());
  if (!line_gradient) return {grad_q, grad_k, grad_v, empty(q, {0}, q.scalar_type())};
  Tensor grad_line = empty(q, {call.heads, line_width}, ScalarType::Float);
  auto* sums = static_cast<float*>(grad_line.data_ptr());
  for (int64_t i = 0; i < call.heads * line_width; ++i) {
    double sum = 0.0;
    for (int64_t piece = 0; piece < pieces; ++piece) sum += lines[piece * call.heads * line_width + i];
    sums[i] = static_cast<float>(sum);
  }
  return {grad_q, grad_k, grad_v, torch::stable::to(grad_line, line->scalar_type())};
}

}  // namespace
}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CPU, library) {
  library.impl("attention_native_fwd", TORCH_BOX(&maelm::attention_native_fwd));
  library.impl("attention_native_bwd", TORCH_BOX(&maelm::attention_native_bwd));
}
