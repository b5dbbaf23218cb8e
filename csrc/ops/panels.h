// How the right operand of a product lies in memory, for attention on the CPU: in panels of 16 columns, which the product
// (attention_block.h) reads from the L1 and L2 caches.

#pragma once

#include <cstdint>

#include "index.h"
#include "vec.h"

namespace maelm {

constexpr int64_t kPanel = 16;  // columns of a panel: two vectors of AVX2, one of AVX-512

inline int64_t padded(int64_t count) { return ceil_div(count, kPanel) * kPanel; }

// Rows of one head: row r starts at data + r * stride and its columns lie side by side.
template <class T>
struct HeadOf {
  T* data;
  int64_t stride;
  T* row(int64_t r) const { return data + r * stride; }
};
using Head = HeadOf<float>;

// The columns of x (rows, dim) in panels (dim / 16, rows, 16), times `factor`.
inline void pack_columns(float* panels, const Head& x, int64_t rows, int64_t dim, float factor) {
  for (int64_t column = 0; column < dim; column += kPanel) {
    for (int64_t r = 0; r < rows; ++r, panels += kPanel) {
      store<Vec>(panels, load<Vec>(x.row(r) + column) * factor);
      store<Vec>(panels + 8, load<Vec>(x.row(r) + column + 8) * factor);
    }
  }
}

// Writes the columns of the eight rows r; it moves words, whatever they mean.
#ifdef __AVX2__
MAELM_INLINE void transpose_8(float* to, int64_t to_stride, Vec* r) {
  Vec t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    store<Vec>(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    store<Vec>(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#else
inline void transpose_8(float* to, int64_t to_stride, const Vec* r) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) to[i * to_stride + j] = r[j][i];
  }
}
#endif

// The rows of x (rows, dim) as columns in panels (ceil(rows / 16), dim, 16), times `factor`; zeros for absent rows.
inline void pack_rows(float* panels, const Head& x, int64_t rows, int64_t dim, float factor) {
  static const float kZeros[128] = {};
  for (int64_t row = 0; row < padded(rows); row += 8) {
    const float* from[8];
    for (int64_t i = 0; i < 8; ++i) from[i] = row + i < rows ? x.row(row + i) : kZeros;
    float* to = panels + row / kPanel * kPanel * dim + row % kPanel;
    for (int64_t column = 0; column < dim; column += 8) {
      Vec lines[8];
      for (int i = 0; i < 8; ++i) lines[i] = load<Vec>(from[i] + column) * factor;
      transpose_8(to + column * kPanel, kPanel, lines);
    }
  }
}

}  // namespace maelm
