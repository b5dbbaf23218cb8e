// What attention on the CPU does to a block of scores, for vectors of MAELM_LANES floats, in functions that carry
// MAELM_TARGET. It has no include guard: attention.cpp includes it once for every width, in a namespace of its own. Every
// function has the target, even the inlined ones, since GCC splits vectors that a function's own target lacks before it
// inlines the function.
//
// Whatever the width, a sum is taken in the same order: both widths give the same bits.

typedef float V __attribute__((vector_size(4 * MAELM_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * MAELM_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * MAELM_LANES)));
typedef int8_t Bytes __attribute__((vector_size(MAELM_LANES)));

constexpr int kVectors = kPanel / MAELM_LANES;  // of a panel's row
constexpr int kTile = 12 / kVectors;            // rows of a product's tile: 12 sums hide the latency of additions

MAELM_TARGET MAELM_INLINE V get(const float* from) {
  V v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
MAELM_TARGET MAELM_INLINE void put(float* to, V v) { std::memcpy(to, &v, sizeof(v)); }

// v where a byte is not zero, else 0.
MAELM_TARGET MAELM_INLINE V kept_lanes(V v, const uint8_t* bytes) {
  Bytes kept;
  std::memcpy(&kept, bytes, sizeof(kept));
  return (V)((Ints)v & __builtin_convertvector(kept, Ints));
}

// exp of what is at most 88, within 2 units in the last place; 0 below the smallest normal number's logarithm. NaN
// stays NaN.
MAELM_TARGET MAELM_INLINE V exponential(V x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2**23: adding it leaves an integer in the low bits
  const V least = V{} - 87.3f;
  const V bounded = least > x ? least : x;
  const V shifted = bounded * 1.44269504f + kRound;
  const V n = shifted - kRound;
  const V r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, ln 2 in two parts
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const V power = (V)(((Words)shifted - 0x4B400000u + 127u) << 23);  // 2**n
  const V y = p * power;
  return x < least ? V{} : y;
}

// out[r][c] = sum over k < depth of a(r, k) * panel[k][c], or added to what is there, for 16 columns c. a(r, k) is
// a[r * lda + k], or a[k * lda + r] if kTransposed.
template <int kRows, bool kTransposed, bool kAdd>
MAELM_TARGET void tile(const float* a, int64_t lda, const float* panel, int64_t depth, float* out, int64_t ldc) {
  V sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    V right[kVectors];
    for (int i = 0; i < kVectors; ++i) right[i] = get(panel + k * kPanel + i * MAELM_LANES);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const float x = kTransposed ? a[k * lda + r] : a[r * lda + k];
      for (int i = 0; i < kVectors; ++i) sums[r][i] += x * right[i];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) {
      float* to = out + r * ldc + i * MAELM_LANES;
      put(to, kAdd ? get(to) + sums[r][i] : sums[r][i]);
    }
  }
}

template <int kRows, bool kTransposed, bool kAdd>
MAELM_TARGET void tile_of(int64_t rows, const float* a, int64_t lda, const float* panel, int64_t depth, float* out,
                          int64_t ldc) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return tile_of<kRows - 1, kTransposed, kAdd>(rows, a, lda, panel, depth, out, ldc);
  }
  tile<kRows, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
}

// out (rows, columns) = a (rows, depth), or a (depth, rows) transposed, times b in panels `panel_step` floats apart.
template <bool kTransposed, bool kAdd>
MAELM_TARGET void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda,
                          const float* panels, int64_t panel_step, float* out, int64_t ldc) {
  const int64_t height = ceil_div(rows, ceil_div(rows, int64_t{kTile}));  // of tiles that are nearly alike
  for (int64_t column = 0; column < columns; column += kPanel, panels += panel_step) {
    for (int64_t row = 0; row < rows; row += height) {
      tile_of<kTile, kTransposed, kAdd>(std::min(height, rows - row), a + row * (kTransposed ? 1 : lda), lda, panels,
                                        depth, out + row * ldc + column, ldc);
    }
  }
}

// A sum and a maximum of 16 columns, of which a panel's row has kVectors.
MAELM_TARGET MAELM_INLINE float total_of(const V* sums) {
  Vec halves[2];
  std::memcpy(halves, sums, sizeof(halves));
  return total(halves[0] + halves[1]);
}
MAELM_TARGET MAELM_INLINE float largest_of(const V* most) {
  Vec halves[2];
  std::memcpy(halves, most, sizeof(halves));
  return largest(halves[1] > halves[0] ? halves[1] : halves[0]);
}

// Turns a query's scores (width,), of which the first `keys` are real, into exp(score - top), the others into 0.
MAELM_TARGET Softmax exponentials(float* row, int64_t keys, int64_t width) {
  std::fill(row + keys, row + width, -kInfinity);
  V most[kVectors], sums[kVectors] = {};
  for (int i = 0; i < kVectors; ++i) most[i] = get(row + i * MAELM_LANES);
  for (int64_t j = kPanel; j < width; j += kPanel) {
    for (int i = 0; i < kVectors; ++i) {
      const V scores = get(row + j + i * MAELM_LANES);
      most[i] = scores > most[i] ? scores : most[i];
    }
  }
  const float top = largest_of(most);
  for (int64_t j = 0; j < width; j += kPanel) {
    for (int i = 0; i < kVectors; ++i) {
      float* at = row + j + i * MAELM_LANES;
      const V weights = exponential(get(at) - top);
      sums[i] += weights;
      put(at, weights);
    }
  }
  return {top, total_of(sums)};
}

// A query's scores (width,), of which the first `keys` are real, become its weights as dropout leaves them; what is in
// `gradient`, the weights' gradient, becomes the scores'. bytes: 0 where dropout zeroes a weight, else 255; null without.
MAELM_TARGET void gradients(float* weights, float* gradient, int64_t keys, int64_t width, float lse,
                            const uint8_t* bytes) {
  std::fill(weights + keys, weights + width, -kInfinity);
  V sums[kVectors] = {};
  for (int64_t j = 0; j < width; j += kPanel) {
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = j + i * MAELM_LANES;
      const V weight = exponential(get(weights + at) - lse);
      V slope = get(gradient + at);
      if (bytes != nullptr) slope = kept_lanes(slope, bytes + at);
      sums[i] += weight * slope;
      put(weights + at, weight);
      put(gradient + at, slope);
    }
  }
  const float mean = total_of(sums);  // of the slopes: not from `out`, whose rounding would not cancel
  for (int64_t at = 0; at < width; at += MAELM_LANES) {
    const V weight = get(weights + at);
    const V slope = weight * (get(gradient + at) - mean);
    put(gradient + at, slope);
    if (bytes == nullptr) continue;
    const V left = kept_lanes(weight, bytes + at);
    put(weights + at, left);
  }
}

constexpr BlockKernels kKernels = {product<false, false>, product<true, false>, product<true, true>, exponentials,
                                   gradients};
