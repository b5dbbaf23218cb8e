// The cross-entropy of bf16 logits, row by row, and its gradient. The forward pass keeps a row's log of the softmax's
// denominator, not its weights: the backward pass reads the logits again and writes their gradient once, scaled.

#include <algorithm>
#include <cmath>
#include <tuple>

#include "cpu.h"
#include "rows.h"
#include "vec.h"

#ifdef __x86_64__
#include "avx512.h"
#endif

namespace maelm {
namespace {

constexpr const char* kOp = "masked_cross_entropy";

#ifdef __x86_64__
constexpr int64_t kStep = 64;  // columns, in four vectors

// The first `count` of 16 lanes.
MAELM_INLINE __mmask16 lanes(int64_t count) { return count >= 16 ? 0xFFFF : count <= 0 ? 0 : (1u << count) - 1; }

// 16 columns of x from `column` on; `absent` in the place of those that are not there.
MAELM_BF16 MAELM_INLINE __m512 wide(const uint16_t* x, int64_t column, __mmask16 there, __m512 absent) {
  const __m512i words = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, x + column)), 16);
  return _mm512_mask_mov_ps(absent, there, _mm512_castsi512_ps(words));
}

MAELM_BF16 float highest(const uint16_t* x, int64_t width) {
  const __m512 absent = _mm512_set1_ps(-INFINITY);
  __m512 most[4] = {absent, absent, absent, absent};
  for (int64_t column = 0; column < width; column += kStep) {
    for (int i = 0; i < 4; ++i) {
      const int64_t at = column + 16 * i;
      most[i] = _mm512_max_ps(most[i], wide(x, at, lanes(width - at), absent));
    }
  }
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])));
}

// The sum of exp(x - top).
MAELM_BF16 float denominator(const uint16_t* x, int64_t width, float top) {
  const __m512 absent = _mm512_set1_ps(-INFINITY), shift = _mm512_set1_ps(top), zero = _mm512_setzero_ps();
  __m512 sum[4] = {zero, zero, zero, zero};
  for (int64_t column = 0; column < width; column += kStep) {
    for (int i = 0; i < 4; ++i) {
      const int64_t at = column + 16 * i;
      const __mmask16 there = lanes(width - at);
      const __m512 weight = exponential(wide(x, at, there, absent), shift);
      sum[i] = _mm512_mask_add_ps(sum[i], there, sum[i], weight);
    }
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
}

MAELM_BF16 bool occurs(const uint16_t* x, int64_t width, float value) {
  const __m512 absent = _mm512_set1_ps(NAN), sought = _mm512_set1_ps(value);
  for (int64_t column = 0; column < width; column += 16) {
    const __m512 here = wide(x, column, lanes(width - column), absent);
    if (_mm512_cmp_ps_mask(here, sought, _CMP_EQ_OQ)) return true;
  }
  return false;
}

// to = factor * exp(x - lse) in bf16.
MAELM_BF16 void weights(uint16_t* to, const uint16_t* x, int64_t width, float lse, float factor) {
  const __m512 absent = _mm512_set1_ps(-INFINITY), shift = _mm512_set1_ps(lse), by = _mm512_set1_ps(factor);
  for (int64_t column = 0; column < width; column += 16) {
    const __mmask16 there = lanes(width - column);
    const __m512 weight = _mm512_mul_ps(exponential(wide(x, column, there, absent), shift), by);
    _mm256_mask_storeu_epi16(to + column, there, (__m256i)_mm512_cvtneps_pbh(weight));
  }
}
#else
float highest(const uint16_t*, int64_t) { return 0.0f; }
float denominator(const uint16_t*, int64_t, float) { return 0.0f; }
bool occurs(const uint16_t*, int64_t, float) { return false; }
void weights(uint16_t*, const uint16_t*, int64_t, float, float) {}
#endif

float value(const uint16_t* x) { return load<float>(reinterpret_cast<const BFloat16*>(x)); }

std::vector<int64_t> check(Tensor& logits, const Tensor& labels, int64_t vocab_size) {
  require(has_bf16_products(), kOp, ": this CPU lacks AVX-512 BF16");
  require(logits.dim() == 2 && logits.scalar_type() == ScalarType::BFloat16, kOp, ": logits must be (rows, V) in bf16");
  require(vocab_size > 0 && vocab_size <= logits.size(1), kOp, ": vocab_size must lie in [1, ", logits.size(1), "]");
  logits = torch::stable::contiguous(logits);
  require_index(labels, kOp, "labels", logits.size(0));
  return checked_index(labels, 0, vocab_size, kOp, "labels", "the vocabulary");
}

// Of each row: the loss in nats, whether the label's is the first of the highest scores, and the log of the softmax's
// denominator.
std::tuple<Tensor, Tensor, Tensor> loss_rows_native_fwd(Tensor logits, Tensor labels, int64_t vocab_size,
                                                        double z_loss) {
  const std::vector<int64_t> label = check(logits, labels, vocab_size);
  const int64_t rows = logits.size(0), width = logits.size(1);
  Tensor losses = empty(logits, {rows}, ScalarType::Float), lse = empty(logits, {rows}, ScalarType::Float);
  Tensor hits = empty(logits, {rows}, ScalarType::Bool);
  const auto* scores = static_cast<const uint16_t*>(logits.data_ptr());
  auto* of_rows = static_cast<float*>(losses.data_ptr());
  auto* logs = static_cast<float*>(lse.data_ptr());
  auto* right = static_cast<bool*>(hits.data_ptr());
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint16_t* x = scores + row_offset(row, width);
      const float top = highest(x, vocab_size), at_label = value(x + label[row]);
      logs[row] = top + std::log(denominator(x, vocab_size, top));
      of_rows[row] = logs[row] - at_label + static_cast<float>(z_loss) * logs[row] * logs[row];
      right[row] = at_label == top && !occurs(x, label[row], top);
    }
  });
  return {losses, hits, lse};
}

// grad: (rows,), the losses'. Returns the logits' gradient, 0 from vocab_size on.
Tensor loss_rows_native_bwd(Tensor grad, Tensor logits, Tensor labels, Tensor lse, int64_t vocab_size, double z_loss) {
  const std::vector<int64_t> label = check(logits, labels, vocab_size);
  const int64_t rows = logits.size(0), width = logits.size(1);
  grad = parameter(grad, kOp, "grad", rows);
  lse = parameter(lse, kOp, "lse", rows);
  Tensor out = empty(logits, {rows, width}, ScalarType::BFloat16);
  const auto* scores = static_cast<const uint16_t*>(logits.data_ptr());
  const auto* upstream = static_cast<const float*>(grad.data_ptr());
  const auto* logs = static_cast<const float*>(lse.data_ptr());
  auto* to = static_cast<uint16_t*>(out.data_ptr());
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint16_t* x = scores + row_offset(row, width);
      uint16_t* gradient = to + row_offset(row, width);
      const float factor = upstream[row] * (1.0f + 2.0f * static_cast<float>(z_loss) * logs[row]);
      weights(gradient, x, vocab_size, logs[row], factor);
      std::fill_n(gradient + vocab_size, width - vocab_size, uint16_t{0});
      const float at_label = std::exp(value(x + label[row]) - logs[row]) * factor - upstream[row];
      store<float>(reinterpret_cast<BFloat16*>(gradient + label[row]), at_label);
    }
  });
  return out;
}

}  // namespace
}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CPU, library) {
  library.impl("loss_rows_native_fwd", TORCH_BOX(&maelm::loss_rows_native_fwd));
  library.impl("loss_rows_native_bwd", TORCH_BOX(&maelm::loss_rows_native_bwd));
}
