// The arithmetic is in functions compiled for AVX-512 (the extension is not) that call nothing from elsewhere: a
// template of the standard library, compiled here with those instructions, could be the one that all of it uses.

#include "bf16_products.h"

#include <algorithm>
#include <memory>

#include "cpu.h"
#include "index.h"

namespace maelm {
namespace {

constexpr int kRows = 8, kVectors = 3, kColumns = 16 * kVectors;  // of a tile: 24 of the 32 registers are its sums
constexpr int64_t kDepth = 2048;                                  // of one pass over fp32 sums in memory
constexpr int64_t kGroupBytes = 512 << 10;                        // packed panels that a thread keeps in its L2 cache
constexpr int64_t kAhead = 256;                                   // words of the depth that a panel is fetched ahead
constexpr int64_t kStrip = 128;                                   // columns that pack_left reads of a row at a time

}  // namespace

#ifdef __x86_64__

bool fast_bf16_products() { return has_bf16_products() && !has_amx(); }

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own header
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif
namespace {

// The first `count` of 16 or 32 lanes.
MAELM_INLINE __mmask16 lanes(int64_t count) { return count >= 16 ? 0xFFFF : count <= 0 ? 0 : (1u << count) - 1; }
MAELM_INLINE __mmask32 lanes_32(int64_t count) {
  return lanes(count) | static_cast<__mmask32>(lanes(count - 16)) << 16;
}

MAELM_INLINE __m512 widen(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

MAELM_INLINE __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
MAELM_INLINE __m512bh pairs_of(__m512i words) { return (__m512bh)words; }
MAELM_INLINE __m512 all(float value) { return _mm512_set1_ps(value); }

// Up to 32 columns as bf16, zeros behind them.
template <class T>
MAELM_INLINE __m512i read_32(const char* from, int64_t count) {
  if constexpr (sizeof(T) == 2) {
    return _mm512_maskz_loadu_epi16(lanes_32(count), from);
  } else {
    const __m512 low = _mm512_maskz_loadu_ps(lanes(count), from);
    const __m512 high = _mm512_maskz_loadu_ps(lanes(count - 16), from + 64);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
  }
}

// Words (a[i], b[i]) of two rows of 32 columns.
MAELM_INLINE void interleave(__m512i a, __m512i b, __m512i* words) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  words[0] = _mm512_permutex2var_epi16(a, low, b);
  words[1] = _mm512_permutex2var_epi16(a, high, b);
}

MAELM_INLINE void transpose_16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// The panels of up to 48 columns each of a part of a right operand. `from`: its first column; `stride`: bytes from row to
// row. sums, unless null: (columns,), which those of bf16 columns are added to.
template <class T>
void pack_panels(uint32_t* panels, const char* from, int64_t stride, int64_t depth, int64_t columns, float* sums) {
  constexpr int64_t kLines = kColumns * sizeof(T) / 64 + 1, kFetched = 16;  // rows fetched ahead, as each is on a new page
  const __m512bh ones = pairs_of(_mm512_set1_epi32(0x3F803F80));
  const int64_t panel_words = (depth + 1) / 2 * kColumns;
  for (int64_t k = 0; k < depth; k += 2, panels += kColumns, from += 2 * stride) {
    const bool pair = k + 1 < depth;
    const char *a = from, *b = pair ? from + stride : from;
    uint32_t* to = panels;
    for (int64_t column = 0; column < columns; column += kColumns, to += panel_words) {
      for (int64_t i = 0; i < kLines; ++i) {
        __builtin_prefetch(a + kFetched * stride + 64 * i);
        __builtin_prefetch(b + kFetched * stride + 64 * i);
      }
      const int64_t left = columns - column;
      __m512i words[4];
      interleave(read_32<T>(a, left), read_32<T>(b, pair ? left : 0), words);
      a += 32 * sizeof(T);
      b += 32 * sizeof(T);
      interleave(read_32<T>(a, left - 32), read_32<T>(b, pair ? left - 32 : 0), words + 2);
      a += 16 * sizeof(T);
      b += 16 * sizeof(T);
      for (int64_t j = 0; j < kVectors; ++j) {
        _mm512_store_si512(to + 16 * j, words[j]);
        if (sums == nullptr) continue;
        const __mmask16 there = lanes(left - 16 * j);
        float* sum = sums + column + 16 * j;
        const __m512 more = _mm512_dpbf16_ps(_mm512_maskz_loadu_ps(there, sum), pairs_of(words[j]), ones);
        _mm512_mask_storeu_ps(sum, there, more);
      }
    }
  }
}

// The same of a right operand that is to be transposed: its rows are the columns of the panels.
template <class T>
void pack_panels_transposed(uint32_t* panels, const char* from, int64_t stride, int64_t depth, int64_t columns, float*) {
  const int64_t words = (depth + 1) / 2;
  for (int64_t column = 0; column < (columns + kColumns - 1) / kColumns * kColumns; column += 16) {
    uint32_t* panel = panels + column / kColumns * words * kColumns + column % kColumns;
    for (int64_t k = 0; k < words; k += 16) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i) {
        const bool there = column + i < columns;
        const char* row = from + (there ? (column + i) * stride : 0) + 2 * k * sizeof(T);
        rows[i] = read_32<T>(row, there ? depth - 2 * k : 0);
        for (size_t line = 0; line < sizeof(T) / 2; ++line) __builtin_prefetch(row + 16 * stride + 64 * line, 0, 2);
      }
      transpose_16(rows);
      const int count = words - k < 16 ? static_cast<int>(words - k) : 16;
      for (int i = 0; i < count; ++i) _mm512_store_si512(panel + (k + i) * kColumns, rows[i]);
    }
  }
}

// Columns of a bf16 (depth, ...) matrix as rows of a left operand: panels [eight columns][word of the depth][column].
// At most kStrip of them. sums: as above.
void pack_left(uint32_t* panels, const char* from, int64_t stride, int64_t depth, int64_t columns, float* sums) {
  constexpr int64_t kFetched = 16;
  const int64_t words = (depth + 1) / 2, panel = words * kRows;
  const __m512bh ones = pairs_of(_mm512_set1_epi32(0x3F803F80));
  __m512 total[kStrip / 16];
  for (auto& sum : total) sum = _mm512_setzero_ps();
  for (int64_t word = 0; word < words; ++word, from += 2 * stride) {
    const bool pair = 2 * word + 1 < depth;
    for (int64_t column = 0; column < columns; column += 32) {
      const int64_t count = columns - column;
      const char *a = from + 2 * column, *b = pair ? a + stride : a;
      __builtin_prefetch(a + kFetched * stride);
      __builtin_prefetch(b + kFetched * stride);
      __m512i pairs[2];
      interleave(read_32<BFloat16>(a, count), read_32<BFloat16>(b, pair ? count : 0), pairs);
      for (int half = 0; half < 2; ++half) {
        __m512& sum = total[column / 16 + half];
        sum = _mm512_dpbf16_ps(sum, pairs_of(pairs[half]), ones);
        uint32_t* to = panels + (column + 16 * half) / kRows * panel + word * kRows;
        if (count > 16 * half) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(pairs[half]));
        if (count > 16 * half + 8) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + panel), _mm512_extracti64x4_epi64(pairs[half], 1));
        }
      }
    }
  }
  if (sums == nullptr) return;
  for (int64_t column = 0; column < columns; column += 16) {
    const __mmask16 there = lanes(columns - column);
    const __m512 before = _mm512_maskz_loadu_ps(there, sums + column);
    _mm512_mask_storeu_ps(sums + column, there, _mm512_add_ps(before, total[column / 16]));
  }
}

struct Gelu {
  __m512 value, slope;
};

// gelu(x) = x P(x), with P the normal distribution, and its derivative P(x) + x p(x). P(-|x|) = exp(-x^2/2) R(t), where
// t = 1 / (1 + 0.31 |x|) and R is a polynomial fitted to a relative error of 5e-6: bf16 keeps 4e-3.
MAELM_INLINE Gelu gelu(__m512 x) {
  const __m512 size = _mm512_abs_ps(x);
  const __m512 t = _mm512_div_ps(all(1.0f), _mm512_fmadd_ps(all(0.31f), size, all(1.0f)));
  __m512 r = _mm512_fmadd_ps(all(-0.0739315688f), t, all(0.1804575622f));
  r = _mm512_fmadd_ps(r, t, all(0.0157372952f));
  r = _mm512_fmadd_ps(r, t, all(0.1334332824f));
  r = _mm512_fmadd_ps(r, t, all(0.1204405352f));
  r = _mm512_fmadd_ps(r, t, all(0.1238607541f));
  // exp(-x^2/2) as a power of two
  const __m512 power = _mm512_max_ps(_mm512_mul_ps(_mm512_mul_ps(x, x), all(-0.7213475204f)), all(-150.0f));
  const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(power, whole);
  __m512 e = _mm512_fmadd_ps(all(0.0013333558f), rest, all(0.0096181291f));
  e = _mm512_fmadd_ps(e, rest, all(0.0555041087f));
  e = _mm512_fmadd_ps(e, rest, all(0.2402265070f));
  e = _mm512_fmadd_ps(e, rest, all(0.6931471806f));
  e = _mm512_scalef_ps(_mm512_fmadd_ps(e, rest, all(1.0f)), whole);
  const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(r, t), e);
  const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ);
  const __m512 below = _mm512_mask_sub_ps(tail, positive, all(1.0f), tail);
  return {_mm512_mul_ps(x, below), _mm512_fmadd_ps(_mm512_mul_ps(x, all(0.3989422804f)), e, below)};
}

// Sixteen columns of one row.
template <Finish kFinish>
MAELM_INLINE void finish(const Target& to, int64_t row, int64_t column, __mmask16 there, __m512 sum) {
  const int64_t at = row * to.stride + column;
  if constexpr (kFinish == Finish::kWide) {
    float* out = static_cast<float*>(to.out) + at;
    if (to.add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, out));
    _mm512_mask_storeu_ps(out, there, sum);
  } else {
    BFloat16* out = static_cast<BFloat16*>(to.out) + at;
    if constexpr (kFinish == Finish::kGeluBackward) {
      const Gelu g = gelu(widen(_mm256_maskz_loadu_epi16(there, to.before + at)));
      _mm256_mask_storeu_epi16(to.activated + at, there, narrow(g.value));
      sum = _mm512_mul_ps(sum, g.slope);
    } else if (to.bias != nullptr) {
      sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, to.bias + column));
    }
    const __m256i rounded = narrow(sum);
    _mm256_mask_storeu_epi16(out, there, rounded);
    if constexpr (kFinish == Finish::kGelu) {
      _mm256_mask_storeu_epi16(to.activated + at, there, narrow(gelu(widen(rounded)).value));
    }
  }
}

// A whole tile, whose rows are the columns of `out`.
MAELM_INLINE void finish_transposed(const Target& to, int64_t row, int64_t column, int64_t rows, int64_t columns,
                                    const float* sums) {
  const __mmask16 there = lanes(rows);
  for (int64_t j = 0; j < columns; j += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = i < kRows ? _mm512_load_si512(sums + i * kColumns + j) : _mm512_setzero_si512();
    transpose_16(r);
    for (int i = 0; i < 16 && j + i < columns; ++i) {
      float* out = static_cast<float*>(to.out) + (column + j + i) * to.stride + row;
      __m512 sum = _mm512_castsi512_ps(r[i]);
      if (to.add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, out));
      _mm512_mask_storeu_ps(out, there, sum);
    }
  }
}

// The first bytes of two or three lines each, whether they are there or not.
template <Finish kFinish>
MAELM_INLINE void fetch(const Target& to, int64_t row, int64_t column) {
  constexpr int64_t kLine = kFinish == Finish::kWide ? 16 : 32;
  const int64_t at = row * to.stride + column;
  for (int64_t i = 0; i < kColumns; i += kLine) {
    __builtin_prefetch(static_cast<char*>(to.out) + (at + i) * (64 / kLine), 1);
    if constexpr (kFinish == Finish::kGeluBackward) __builtin_prefetch(to.before + at + i);
    if constexpr (kFinish == Finish::kGelu || kFinish == Finish::kGeluBackward) {
      __builtin_prefetch(to.activated + at + i, 1);
    }
  }
}

// A tile of eight rows and of 16 columns for each of kOfTile vectors, of which `rows` and `columns` are there. left: its
// first word.
template <Finish kFinish, bool kPanels, int kOfTile>
void tile(const uint32_t* left, int64_t stride, const uint32_t* panel, int64_t words, const Target& to, int64_t row,
          int64_t column, int64_t rows, int64_t columns) {
  if constexpr (kFinish == Finish::kWideTransposed) {
    for (int64_t i = 0; i < columns; ++i) {
      __builtin_prefetch(static_cast<float*>(to.out) + (column + i) * to.stride + row, 1);
    }
  } else {
    for (int64_t i = 0; i < rows; ++i) fetch<kFinish>(to, row + i, column);
  }
  __m512 sum[kRows][kOfTile];
  for (auto& of_row : sum) {
    for (auto& s : of_row) s = _mm512_setzero_ps();
  }
  for (int64_t word = 0; word < words; ++word, panel += kColumns) {
    __builtin_prefetch(kPanels ? left + (word + kAhead) * kRows : left + (kRows + word % kRows) * stride + word);
    __m512bh right[kOfTile];
    for (int j = 0; j < kOfTile; ++j) right[j] = pairs_of(_mm512_load_si512(panel + 16 * j));
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const uint32_t* at = kPanels ? left + word * kRows + i : left + i * stride + word;
      const __m512bh pair = pairs_of(_mm512_set1_epi32(read<int32_t>(at)));
#pragma GCC unroll 3
      for (int j = 0; j < kOfTile; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], pair, right[j]);
    }
  }
  alignas(64) float sums[kRows][kColumns];  // in memory, since finish() needs registers of its own
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kOfTile; ++j) _mm512_store_ps(sums[i] + 16 * j, sum[i][j]);
  }
  if constexpr (kFinish == Finish::kWideTransposed) {
    finish_transposed(to, row, column, rows, columns, sums[0]);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; j += 16) {
      finish<kFinish>(to, row + i, column + j, lanes(columns - j), _mm512_load_ps(sums[i] + j));
    }
  }
}

}  // namespace
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace {

using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, const Target&, int64_t, int64_t, int64_t,
                      int64_t);

template <bool kPanels, int kOfTile>
Tile tile_of(Finish finish) {
  switch (finish) {
    case Finish::kPlain:
      return tile<Finish::kPlain, kPanels, kOfTile>;
    case Finish::kGelu:
      return tile<Finish::kGelu, kPanels, kOfTile>;
    case Finish::kGeluBackward:
      return tile<Finish::kGeluBackward, kPanels, kOfTile>;
    case Finish::kWideTransposed:
      return tile<Finish::kWideTransposed, kPanels, kOfTile>;
    default:
      return tile<Finish::kWide, kPanels, kOfTile>;
  }
}

// For the columns of a panel that are there: what a tile computes beyond them is lost.
template <bool kPanels>
Tile tile_of(Finish finish, int64_t columns) {
  return columns > 32   ? tile_of<kPanels, 3>(finish)
         : columns > 16 ? tile_of<kPanels, 2>(finish)
                        : tile_of<kPanels, 1>(finish);
}

void pack(uint32_t* panels, const Matrix& right, bool transposed, int64_t column, int64_t depth, int64_t columns,
          float* sums) {
  const int64_t stride = right.stride * (right.wide ? 4 : 2);
  const char* from = transposed ? right.at(column, 0) : right.at(0, column);
  const auto run = transposed ? (right.wide ? pack_panels_transposed<float> : pack_panels_transposed<BFloat16>)
                              : (right.wide ? pack_panels<float> : pack_panels<BFloat16>);
  run(panels, from, stride, depth, columns, sums);
}

// Words that a thread keeps for its next product, at a multiple of 64 bytes.
uint32_t* scratch(int64_t words) {
  thread_local std::vector<uint32_t> kept;
  const size_t needed = static_cast<size_t>(words) + 16;
  if (kept.size() < needed) kept.resize(needed);
  void* start = kept.data();
  size_t room = kept.size() * 4;
  return static_cast<uint32_t*>(std::align(64, static_cast<size_t>(words) * 4, start, room));
}

}  // namespace

void multiply(const Left& left, const Matrix& right, bool transposed, const Target& to, int64_t rows, int64_t depth,
              int64_t columns, float* sums) {
  const int64_t words = ceil_div(depth, 2), panels = ceil_div(columns, kColumns), panel_words = words * kColumns;
  const int64_t threads = torch::stable::get_num_threads();
  // A task is a group of panels, which it packs, and a part of the rows, which it multiplies with them.
  int64_t size = std::clamp<int64_t>(kGroupBytes / (4 * panel_words), 1, panels);
  if (threads > 1) size = std::clamp<int64_t>(panels / (4 * threads), 1, size);
  const int64_t groups = ceil_div(panels, size), strips = ceil_div(rows, kRows);
  const int64_t parts = std::clamp<int64_t>(ceil_div(threads, groups), 1, strips);
  const int64_t rest = columns - (panels - 1) * kColumns;  // of the last panel
  const auto choose = left.panels ? tile_of<true> : tile_of<false>;
  const Tile whole = choose(to.finish, kColumns), short_one = choose(to.finish, rest);
  torch::stable::parallel_for(0, groups * parts, 1, [&](int64_t begin, int64_t end) {
    uint32_t* packed = scratch(size * panel_words + kRows * words);
    auto* few = reinterpret_cast<char*>(packed + size * panel_words);  // the last rows, where eight would be too many
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / parts * size, last = std::min(panels, first + size), part = task % parts;
      const int64_t start = first * kColumns;
      pack(packed, right, transposed, start, depth, std::min(columns, last * kColumns) - start,
           sums == nullptr || part > 0 ? nullptr : sums + start);
      for (int64_t strip = strips * part / parts; strip < strips * (part + 1) / parts; ++strip) {
        const int64_t row = strip * kRows, count = std::min<int64_t>(kRows, rows - row);
        const char* from = left.data + (left.panels ? strip * words * kRows : row * left.stride) * 4;
        int64_t stride = left.stride;
        if (!left.panels && count < kRows) {
          std::fill_n(few, kRows * words * 4, 0);
          for (int64_t i = 0; i < count; ++i) std::memcpy(few + i * words * 4, from + i * stride * 4, words * 4);
          from = few;
          stride = words;
        }
        for (int64_t panel = first; panel < last; ++panel) {
          const int64_t column = panel * kColumns;
          const Tile run = panel + 1 < panels ? whole : short_one;
          run(reinterpret_cast<const uint32_t*>(from), stride, packed + (panel - first) * panel_words, words, to, row,
              column, count, std::min<int64_t>(kColumns, columns - column));
        }
      }
    }
  });
}

void multiply_transposed(const Matrix& left, const Matrix& right, float* out, float* sums, int64_t rows, int64_t depth,
                         int64_t columns) {
  const bool swap = columns < rows;  // the narrower is packed whole, the wider in groups, which stay in the L2 cache
  const Matrix &narrow = swap ? right : left, &wide = swap ? left : right;
  const int64_t width = swap ? columns : rows, most = std::min(depth, kDepth);
  std::fill_n(sums, rows, 0.0f);
  if (depth == 0) std::fill_n(out, rows * columns, 0.0f);
  const std::unique_ptr<uint32_t[]> panels(new uint32_t[ceil_div(width, kRows) * kRows * ceil_div(most, 2)]);
  Target to;
  to.finish = swap ? Finish::kWideTransposed : Finish::kWide;
  to.out = out;
  to.stride = columns;
  for (int64_t start = 0; start < depth; start += most, to.add = true) {
    const int64_t part = std::min(most, depth - start), words = ceil_div(part, 2);
    torch::stable::parallel_for(0, ceil_div(width, kStrip), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * kStrip; row < std::min(width, end * kStrip); row += kStrip) {
        pack_left(panels.get() + row * words, narrow.at(start, row), narrow.stride * 2, part,
                  std::min(kStrip, width - row), swap ? nullptr : sums + row);
      }
    });
    Matrix below = wide;
    below.data = wide.at(start, 0);
    multiply({reinterpret_cast<const char*>(panels.get()), 0, true}, below, false, to, width, part,
             swap ? rows : columns, swap ? sums : nullptr);
  }
}

#else

bool fast_bf16_products() { return false; }
void multiply(const Left&, const Matrix&, bool, const Target&, int64_t, int64_t, int64_t, float*) {}
void multiply_transposed(const Matrix&, const Matrix&, float*, float*, int64_t, int64_t, int64_t) {}

#endif

}  // namespace maelm
