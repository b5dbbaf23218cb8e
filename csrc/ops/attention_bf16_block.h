// What attention does to a block of scores with the bf16 products of AVX-512 (vdpbf16ps), in functions that carry
// MAELM_BF16: only a CPU that has them may call these. Such a product multiplies words: two bf16 numbers that follow one
// another along the depth. Its sums are fp32, as is all between two products: scores, softmax, slopes, the line's
// gradient. The weights and the scores' gradient are rounded to bf16 when they enter the next product.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "attention_call.h"
#include "avx512.h"

namespace maelm {

constexpr int kTileRows = 12, kTileVectors = 2;  // 24 sums hide the latency of additions
constexpr int64_t kPairs = kPanel;               // words of a panel's row
constexpr int64_t kFetched = 24;                 // rows that are fetched ahead when they are packed

// Where the biases of 16 keys lie. As long as the keys lie within 32 positions, their biases are two neighbouring
// vectors, permuted.
struct Span {
  int32_t at[16];       // near: what of the 32 from base on belongs to a key. Else: the key's position
  int32_t from[2][16];  // near: the lane of the key that each of the 32 belongs to
  uint16_t has[2];      // near: which of the 32 belong to a key
  bool near;
  int64_t base, count;
};

inline Span describe_span(const int32_t* positions, int64_t count) {
  Span span = {};
  span.count = count;
  span.base = *std::min_element(positions, positions + count);
  span.near = true;
  for (int64_t lane = 0; lane < count && span.near; ++lane) {
    const int64_t at = positions[lane] - span.base, bit = at % 16;
    span.near = at < 32 && !(span.has[at / 16] >> bit & 1);
    if (!span.near) break;
    span.at[lane] = static_cast<int32_t>(at);
    span.from[at / 16][bit] = static_cast<int32_t>(lane);
    span.has[at / 16] |= static_cast<uint16_t>(1 << bit);
  }
  if (!span.near) {
    for (int64_t lane = 0; lane < 16; ++lane) span.at[lane] = positions[std::min(lane, count - 1)];
  }
  return span;
}

// row: of the query, Distances::row(head) - least() - its position.
MAELM_BF16 MAELM_INLINE __m512 bias_of(const Span& span, const float* row) {
  const __m512i at = _mm512_loadu_si512(span.at);
  if (!span.near) return _mm512_i32gather_ps(at, row, 4);
  return _mm512_permutex2var_ps(_mm512_loadu_ps(row + span.base), at, _mm512_loadu_ps(row + span.base + 16));
}

// row[position of key j of the span] += gradient[j].
MAELM_BF16 MAELM_INLINE void add_back(const Span& span, __m512 gradient, float* row) {
  if (!span.near) {
    float lanes[16];
    _mm512_storeu_ps(lanes, gradient);
    for (int64_t lane = 0; lane < span.count; ++lane) row[span.at[lane]] += lanes[lane];
    return;
  }
  float* to = row + span.base;
  for (int half = 0; half < 2; ++half, to += 16) {
    if (span.has[half] == 0) continue;
    const __m512 moved = _mm512_maskz_permutexvar_ps(span.has[half], _mm512_loadu_si512(span.from[half]), gradient);
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), moved));
  }
}

// Asks for `count` rows from `row` on, whether they are there or not: a head's rows lie far apart, on pages of their own,
// and no prefetcher follows them.
template <int kWrite = 0>
MAELM_INLINE void fetch_rows(const HeadOf<uint16_t>& x, int64_t row, int64_t count, int64_t dim) {
  for (int64_t r = row; r < row + count; ++r) {
    for (int64_t column = 0; column < dim; column += 32) __builtin_prefetch(x.row(r) + column, kWrite);
  }
}

// The rows of x (rows, dim) as columns in panels (ceil(rows / 16), dim / 2, 16) of words; zeros for absent rows.
MAELM_BF16 inline void pack_words(uint32_t* panels, const HeadOf<uint16_t>& x, int64_t rows, int64_t dim) {
  static const uint16_t kZeros[128] = {};
  for (int64_t row = 0; row < padded(rows); row += 8) {
    fetch_rows(x, row + kFetched, 8, dim);
    const uint16_t* from[8];
    for (int64_t i = 0; i < 8; ++i) from[i] = row + i < rows ? x.row(row + i) : kZeros;
    uint32_t* to = panels + row / kPanel * kPanel * (dim / 2) + row % kPanel;
    for (int64_t column = 0; column < dim; column += 16, to += 8 * kPanel) {
      Vec lines[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&lines[i], from[i] + column, sizeof(Vec));
      transpose_8(reinterpret_cast<float*>(to), kPanel, lines);
    }
  }
}

MAELM_BF16 MAELM_INLINE __m512i widened(const uint16_t* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// The columns of x (rows, dim) in panels (dim / 16, ceil(rows / 2), 16) of words, each of two rows; a zero for an absent
// one.
MAELM_BF16 inline void pack_pairs(uint32_t* panels, const HeadOf<uint16_t>& x, int64_t rows, int64_t dim) {
  for (int64_t column = 0; column < dim; column += kPanel) {
    for (int64_t r = 0; r < rows; r += 2, panels += kPanel) {
      if (column % 32 == 0) fetch_rows({x.row(0) + column, x.stride}, r + kFetched, 2, 1);
      const __m512i low = widened(x.row(r) + column);
      const __m512i high = r + 1 < rows ? widened(x.row(r + 1) + column) : _mm512_setzero_si512();
      _mm512_storeu_si512(panels, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

// out[r][c] = sum over k < depth of the two products of word a(r, k) and word panel[k][c], or added to what is there, for
// the 16 columns of each of kVectors panels. a(r, k) starts at a[r * lda + 2 k], or at a[2 (k * lda + r)] if kTransposed.
template <int kRows, int kVectors, bool kTransposed, bool kAdd>
MAELM_BF16 void bf16_tile(const uint16_t* a, int64_t lda, const uint32_t* panels, int64_t panel_step, int64_t depth,
                          float* out, int64_t ldc) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) {
      sums[r][i] = kAdd ? _mm512_loadu_ps(out + r * ldc + i * kPanel) : _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512i right[kVectors];
    for (int i = 0; i < kVectors; ++i) right[i] = _mm512_loadu_si512(panels + i * panel_step + k * kPanel);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      int32_t word;
      std::memcpy(&word, kTransposed ? a + 2 * (k * lda + r) : a + r * lda + 2 * k, sizeof(word));
      const __m512i left = _mm512_set1_epi32(word);
      for (int i = 0; i < kVectors; ++i) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], (__m512bh)left, (__m512bh)right[i]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) _mm512_storeu_ps(out + r * ldc + i * kPanel, sums[r][i]);
  }
}

template <int kRows, int kVectors, bool kTransposed, bool kAdd>
MAELM_BF16 void bf16_tile_of(int64_t rows, const uint16_t* a, int64_t lda, const uint32_t* panels, int64_t panel_step,
                             int64_t depth, float* out, int64_t ldc) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return bf16_tile_of<kRows - 1, kVectors, kTransposed, kAdd>(rows, a, lda, panels, panel_step, depth, out, ldc);
    }
  }
  bf16_tile<kRows, kVectors, kTransposed, kAdd>(a, lda, panels, panel_step, depth, out, ldc);
}

// out (rows, columns) = a (rows, depth words), or a (depth, rows) of words transposed, times b in panels `panel_step`
// words apart.
template <bool kTransposed, bool kAdd>
MAELM_BF16 void bf16_product(int64_t rows, int64_t columns, int64_t depth, const uint16_t* a, int64_t lda,
                             const uint32_t* panels, int64_t panel_step, float* out, int64_t ldc) {
  const int64_t height = ceil_div(rows, ceil_div(rows, int64_t{kTileRows}));  // of tiles that are nearly alike
  for (int64_t column = 0; column < columns; column += kTileVectors * kPanel) {
    const auto tile = columns - column > kPanel ? bf16_tile_of<kTileRows, kTileVectors, kTransposed, kAdd>
                                                : bf16_tile_of<kTileRows, 1, kTransposed, kAdd>;
    const uint32_t* right = panels + column / kPanel * panel_step;
    for (int64_t row = 0; row < rows; row += height) {
      tile(std::min(height, rows - row), a + row * (kTransposed ? 2 : lda), lda, right, panel_step, depth,
           out + row * ldc + column, ldc);
    }
  }
}

// to (dim,) = from (dim,) * factor in bf16.
MAELM_BF16 inline void write_bf16(uint16_t* to, const float* from, int64_t dim, float factor) {
  const __m512 by = _mm512_set1_ps(factor);
  for (int64_t column = 0; column < dim; column += 16) {
    const __m256bh halves = _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(from + column), by));
    std::memcpy(to + column, &halves, sizeof(halves));
  }
}

// The lanes of 16 keys, of which `left` exist.
inline __mmask16 lanes_of(int64_t left) { return left >= 16 ? 0xFFFF : static_cast<__mmask16>((1 << left) - 1); }

// Those that dropout keeps of the 16 keys from `key` on; bits: a bit for each key, or null without dropout.
MAELM_INLINE __mmask16 lanes_kept(const uint8_t* bits, int64_t key) {
  return bits == nullptr ? static_cast<__mmask16>(0xFFFF) : read<uint16_t>(bits + key / 8);
}

// Products of a query and its keys (padded(keys),) with the bias of the spans, if there are any.
MAELM_BF16 MAELM_INLINE __m512 score_of(const float* products, int64_t key, __m512 scale, const Span* spans,
                                        const float* bias) {
  const __m512 product = _mm512_loadu_ps(products + key);
  return spans == nullptr ? _mm512_mul_ps(product, scale)
                          : _mm512_fmadd_ps(product, scale, bias_of(spans[key / 16], bias));
}

// Of a query's products with its keys (padded(keys),): weights (padded(keys),), exp(score - top) as dropout leaves them,
// in bf16.
MAELM_BF16 inline Softmax bf16_weights(float* products, int64_t keys, float scale, const Span* spans, const float* bias,
                                       const uint8_t* bits, uint16_t* weights) {
  const __m512 absent = _mm512_set1_ps(-kInfinity), by = _mm512_set1_ps(scale);
  __m512 most = absent;
  for (int64_t key = 0; key < keys; key += 16) {
    const __m512 score =
        _mm512_mask_mov_ps(absent, lanes_of(keys - key), score_of(products, key, by, spans, bias));
    most = _mm512_max_ps(most, score);
    _mm512_storeu_ps(products + key, score);
  }
  const float top = _mm512_reduce_max_ps(most);
  const __m512 shift = _mm512_set1_ps(top);
  __m512 sums = _mm512_setzero_ps();
  for (int64_t key = 0; key < keys; key += 16) {
    const __m512 weight = exponential(_mm512_loadu_ps(products + key), shift);
    sums = _mm512_add_ps(sums, weight);
    const __m256bh halves = _mm512_maskz_cvtneps_pbh(lanes_kept(bits, key), weight);
    std::memcpy(weights + key, &halves, sizeof(halves));
  }
  return {top, _mm512_reduce_add_ps(sums)};
}

// A query of the backward pass.
struct QueryRow {
  float *products, *slopes;  // with its keys, and of its upstream gradient with their values; (padded(keys),)
  float lse;                 // infinity: all of its weights are 0
  const float* bias;
  const uint8_t* bits;
  float* lines[2];     // where the gradient of its biases is added, by turns: a span and the next one overlap
  uint16_t* gradient;  // of the scores, (padded(keys),) in bf16
};

MAELM_BF16 MAELM_INLINE __m512i words_of(__m512 low, __m512 high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// What the products of a query with the 16 keys from `key` on become, in place: weights; and the upstream gradient's with
// their values: slopes, which are added to `sums` by weight. Returns the weights as dropout leaves them.
MAELM_BF16 MAELM_INLINE __m512 weights_and_slopes(const QueryRow& query, int64_t key, int64_t keys, __m512 scale,
                                                  __m512 dropout_scale, const Span* spans, __m512& sums) {
  const __m512 score = score_of(query.products, key, scale, spans, query.bias);
  const __m512 weight = _mm512_maskz_mov_ps(lanes_of(keys - key), exponential(score, _mm512_set1_ps(query.lse)));
  const __mmask16 kept = lanes_kept(query.bits, key);
  const __m512 slope = _mm512_maskz_mul_ps(kept, _mm512_loadu_ps(query.slopes + key), dropout_scale);
  sums = _mm512_fmadd_ps(weight, slope, sums);
  _mm512_storeu_ps(query.products + key, weight);
  _mm512_storeu_ps(query.slopes + key, slope);
  return _mm512_maskz_mov_ps(kept, weight);
}

// The gradients of those keys' scores; mean: of the slopes, by weight.
MAELM_BF16 MAELM_INLINE __m512 scores_gradient(const QueryRow& query, int64_t key, __m512 mean, const Span* span) {
  const __m512 slope = _mm512_sub_ps(_mm512_loadu_ps(query.slopes + key), mean);
  const __m512 gradient = _mm512_mul_ps(_mm512_loadu_ps(query.products + key), slope);
  const __m256bh halves = _mm512_cvtneps_pbh(gradient);
  std::memcpy(query.gradient + key, &halves, sizeof(halves));
  if (span != nullptr) add_back(*span, gradient, query.lines[key / 16 % 2]);
  return gradient;
}

// Two queries' weights as dropout leaves them and the gradients of their scores, each (padded(keys),) words of the two;
// the gradients also query by query. lines: whether the biases' gradient is wanted.
MAELM_BF16 inline void bf16_gradients(const QueryRow& first, const QueryRow& second, int64_t keys, float scale,
                                      float dropout_scale, const Span* spans, bool lines, uint32_t* weight_words,
                                      uint32_t* gradient_words) {
  const QueryRow a = first, b = second;  // copies, which no store can change
  const __m512 by = _mm512_set1_ps(scale), kept_by = _mm512_set1_ps(dropout_scale);
  __m512 sums_a = _mm512_setzero_ps(), sums_b = _mm512_setzero_ps();
  for (int64_t key = 0; key < keys; key += 16) {
    const __m512 left_a = weights_and_slopes(a, key, keys, by, kept_by, spans, sums_a);
    const __m512 left_b = weights_and_slopes(b, key, keys, by, kept_by, spans, sums_b);
    _mm512_storeu_si512(weight_words + key, words_of(left_a, left_b));
  }
  // of the slopes: not from `out`, whose rounding would not cancel
  const __m512 mean_a = _mm512_set1_ps(_mm512_reduce_add_ps(sums_a));
  const __m512 mean_b = _mm512_set1_ps(_mm512_reduce_add_ps(sums_b));
  for (int64_t key = 0; key < keys; key += 16) {
    const Span* span = lines ? spans + key / 16 : nullptr;
    const __m512 gradient_a = scores_gradient(a, key, mean_a, span), gradient_b = scores_gradient(b, key, mean_b, span);
    _mm512_storeu_si512(gradient_words + key, words_of(gradient_a, gradient_b));
  }
}

}  // namespace maelm
