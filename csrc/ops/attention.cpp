// Attention over packed sequences on the CPU, forward and backward. A (sequence, head) is one piece of work: its
// keys and values are first copied into panels (panels.h); the scores of a block of queries never leave the L1 and L2
// caches. The backward pass computes them again. All of it is in fp32: bf16 and fp16 are widened before and rounded
// after, but for bf16 on a CPU that multiplies it (attention_bf16.cpp). Where the bias excludes distances, a sliding window, a block of queries leaves out the keys beyond them.
//
// Everything that is summed is summed in an order that depends on the lengths alone, never on the number of threads.

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "attention_bf16.h"

namespace maelm {
namespace {

constexpr int64_t kMostRows = 60;          // of a block
constexpr int64_t kRowsOfTiles = 12;       // rows of whole tiles, at any width of vectors

// Rows of a block of scores that are `width` wide: whole tiles, no more than there are.
inline int64_t block_rows(int64_t rows, int64_t width) {
  const int64_t fit = kBlockBytes / static_cast<int64_t>(sizeof(float)) / std::max<int64_t>(width, 1);
  return std::min(std::clamp(fit / kRowsOfTiles * kRowsOfTiles, kRowsOfTiles, kMostRows), rows);
}

MAELM_INLINE float largest(Vec v) {
  const auto most = [&](int a, int b) { return v[b] > v[a] ? v[b] : v[a]; };
  return std::max(std::max(most(0, 4), most(1, 5)), std::max(most(2, 6), most(3, 7)));
}

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

// The extension is compiled for AVX2; a CPU with AVX-512 runs the wider functions.
const BlockKernels& kernels() { return has_avx512() ? wide::kKernels : narrow::kKernels; }
#else
const BlockKernels& kernels() { return narrow::kKernels; }
#endif

// What a call multiplies in: bf16 where its tensors are and the CPU can, else fp32.
ScalarType product_type(const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto narrow = [](const Tensor& x) { return x.scalar_type() == ScalarType::BFloat16; };
  return narrow(q) && narrow(k) && narrow(v) && has_bf16_products() ? ScalarType::BFloat16 : ScalarType::Float;
}

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
  const ScalarType type = product_type(q, k, v);
  const Call call(type, q, k, v, line, q_starts, k_starts, q_positions, k_positions, scale, dropout_p, seed, place);
  const int64_t dim = call.dim, total_queries = call.q.size(0);
  Tensor out = empty(q, {total_queries, call.heads, dim}, type);
  Tensor lse = empty(q, {call.heads, total_queries}, ScalarType::Float);
  if (type == ScalarType::BFloat16) {
    bf16_forward(call, out, lse);
    return {out, lse};
  }
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
        const auto [block_size, seen] = call.block(s, start, block_rows(queries, padded(keys)), extents);
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
  Backward(const Call& call, const BackwardTensors& tensors)
      : call_(call),
        tensors_(tensors),
        lse_(static_cast<const float*>(tensors.lse.data_ptr())),
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
    const Head up = call_.queries_of(tensors_.grad_out, s, h), to_q = call_.queries_of(tensors_.q, s, h);
    const Head to_k = call_.keys_of(tensors_.k, s, h), to_v = call_.keys_of(tensors_.v, s, h);
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
      const auto [block_size, seen] = call_.block(s, start, block_rows(queries, padded(keys)), extents_);
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
  const BackwardTensors& tensors_;
  const float* lse_;
  int64_t widest_, block_size_;
  Scratch scratch_;
  float *weights_, *gradient_, *keys_t_, *keys_, *values_t_, *queries_, *upstream_, *by_distance_;
  std::vector<uint8_t> bytes_;
  Spans spans_;
  Extents extents_;
};

// Gradients of q, k, v, the last `stacked` (0, 2 or 3) of them in one tensor, and, if asked for, of the line; else that has
// no elements.
std::tuple<std::vector<Tensor>, Tensor> attention_native_bwd(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor lse,
                                                             std::optional<Tensor> line, Tensor q_starts,
                                                             Tensor k_starts, Tensor q_positions, Tensor k_positions,
                                                             bool line_gradient, double scale, double dropout_p,
                                                             std::optional<Tensor> seed, int64_t place,
                                                             int64_t stacked) {
  const ScalarType type = product_type(q, k, v);
  const Call call(type, q, k, v, line, q_starts, k_starts, q_positions, k_positions, scale, dropout_p, seed, place);
  grad_out = Call::rows(grad_out, "grad_out", type);
  require(grad_out.size(0) == call.q.size(0) && grad_out.size(1) == call.heads && grad_out.size(2) == call.dim, kOp,
          ": grad_out must have the shape of q");
  require(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() && lse.numel() == call.heads * call.q.size(0),
          kOp, ": lse must be what the forward pass returned");
  require(!line_gradient || line.has_value(), kOp, ": there is no line to differentiate by");
  std::vector<Tensor> gradients, apart;
  for (int64_t i = 0; i < 3; ++i) {
    const int64_t length = (i == 0 ? call.q : call.k).size(0), place = i - (3 - stacked);  // place: in the stack
    if (place < 0) {
      apart.push_back(gradients.emplace_back(empty(q, {length, call.heads, call.dim}, type)));
      continue;
    }
    if (place == 0) gradients.push_back(empty(q, {length, stacked, call.heads, call.dim}, type));
    apart.push_back(torch::stable::select(gradients.back(), 1, place));
  }
  const BackwardTensors tensors = {grad_out, lse, apart[0], apart[1], apart[2]};
  const int64_t line_width = line_gradient ? line->size(1) : 0;
  const auto backward = type == ScalarType::BFloat16 ? bf16_backward : each_backward<Backward>;
  const std::vector<double> lines = backward(call, tensors, line_width);
  const Tensor* inputs[] = {&q, &k, &v};  // a stack's first one names its type
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = torch::stable::to(gradients[i], inputs[i]->scalar_type());
  }
  if (!line_gradient) return {gradients, empty(q, {0}, q.scalar_type())};
  Tensor grad_line = empty(q, {call.heads, line_width}, ScalarType::Float);
  auto* sums = static_cast<float*>(grad_line.data_ptr());
  for (int64_t i = 0; i < call.heads * line_width; ++i) {
    double sum = 0.0;
    for (int64_t piece = 0; piece < pieces_of_line(call); ++piece) sum += lines[piece * call.heads * line_width + i];
    sums[i] = static_cast<float>(sum);
  }
  return {gradients, torch::stable::to(grad_line, line->scalar_type())};
}

}  // namespace
}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CPU, library) {
  library.impl("attention_native_fwd", TORCH_BOX(&maelm::attention_native_fwd));
  library.impl("attention_native_bwd", TORCH_BOX(&maelm::attention_native_bwd));
}
