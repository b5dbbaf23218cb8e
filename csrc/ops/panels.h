// Products of matrices on the CPU, for attention. The right operand lies in panels of 16 columns, which a product reads
// from the L1 and L2 caches; a tile of 6 x 16 sums stays in the registers.

#pragma once

#include <algorithm>
#include <cstdint>

#include "index.h"
#include "vec.h"

namespace maelm {

constexpr int64_t kPanel = 16;  // columns of a panel: two Vec
constexpr int64_t kTile = 6;    // rows of a product's tile: 6 x 2 sums fill the registers, with what they read

inline int64_t padded(int64_t count) { return ceil_div(count, kPanel) * kPanel; }

// Rows of one head: row r starts at data + r * stride and its columns lie side by side.
struct Head {
  float* data;
  int64_t stride;
  float* row(int64_t r) const { return data + r * stride; }
};

// out[r][c] = sum over k < depth of a(r, k) * panel[k][c], or added to what is there, for 16 columns c. a(r, k) is
// a[r * lda + k], or a[k * lda + r] if kTransposed.
template <int kRows, bool kTransposed, bool kAdd>
MAELM_INLINE void tile(const float* a, int64_t lda, const float* panel, int64_t depth, float* out, int64_t ldc) {
  Vec sums[kRows][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const Vec left = load<Vec>(panel + k * kPanel), right = load<Vec>(panel + k * kPanel + 8);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const float x = kTransposed ? a[k * lda + r] : a[r * lda + k];
      sums[r][0] += x * left;
      sums[r][1] += x * right;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    float* to = out + r * ldc;
    store<Vec>(to, kAdd ? load<Vec>(to) + sums[r][0] : sums[r][0]);
    store<Vec>(to + 8, kAdd ? load<Vec>(to + 8) + sums[r][1] : sums[r][1]);
  }
}

template <bool kTransposed, bool kAdd>
void tile_of(int64_t rows, const float* a, int64_t lda, const float* panel, int64_t depth, float* out, int64_t ldc) {
  switch (rows) {
    case 6: return tile<6, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    case 5: return tile<5, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    case 4: return tile<4, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    case 3: return tile<3, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    case 2: return tile<2, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    default: return tile<1, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
  }
}

// out (rows, columns) = a (rows, depth), or a (depth, rows) transposed, times b in panels `panel_step` floats apart.
template <bool kTransposed, bool kAdd>
void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda, const float* panels,
             int64_t panel_step, float* out, int64_t ldc) {
  for (int64_t column = 0; column < columns; column += kPanel, panels += panel_step) {
    for (int64_t row = 0; row < rows; row += kTile) {
      tile_of<kTransposed, kAdd>(std::min(kTile, rows - row), a + row * (kTransposed ? 1 : lda), lda, panels, depth,
                                 out + row * ldc + column, ldc);
    }
  }
}

// The columns of x (rows, dim) in panels (dim / 16, rows, 16), times `factor`.
inline void pack_columns(float* panels, const Head& x, int64_t rows, int64_t dim, float factor) {
  for (int64_t column = 0; column < dim; column += kPanel) {
    for (int64_t r = 0; r < rows; ++r, panels += kPanel) {
      store<Vec>(panels, load<Vec>(x.row(r) + column) * factor);
      store<Vec>(panels + 8, load<Vec>(x.row(r) + column + 8) * factor);
    }
  }
}

#ifdef __AVX2__
MAELM_INLINE void transpose_8(float* to, int64_t to_stride, const float* const* from, float factor) {
  Vec r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = load<Vec>(from[i]) * factor;
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
inline void transpose_8(float* to, int64_t to_stride, const float* const* from, float factor) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) to[i * to_stride + j] = from[j][i] * factor;
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
      transpose_8(to + column * kPanel, kPanel, from, factor);
      for (auto& pointer : from) pointer += 8;
    }
  }
}

}  // namespace maelm
