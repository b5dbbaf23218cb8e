// Eight floats at a time, written with the compiler's vector extension: AVX2 where the target has it, whatever the
// target has elsewhere. each() runs one generic lambda over a row in steps of Vec (eight columns) and, at its end, of
// float.

#pragma once

#include <cstdint>
#include <cstring>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace maelm {

using BFloat16 = torch::headeronly::BFloat16;
using Half = torch::headeronly::Half;

typedef float Vec __attribute__((vector_size(32)));
typedef uint32_t WordVec __attribute__((vector_size(32)));
typedef uint16_t HalfVec __attribute__((vector_size(16)));
typedef int8_t ByteVec __attribute__((vector_size(8)));
typedef int32_t IntVec __attribute__((vector_size(32)));

#define MAELM_INLINE inline __attribute__((always_inline))

template <class To, class From>
MAELM_INLINE To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class To>
MAELM_INLINE To read(const void* from) {
  To to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

// load<Vec>(p), load<float>(p): eight columns or one, widened to fp32.
template <class Step>
MAELM_INLINE Step load(const float* p) {
  return read<Step>(p);
}

template <class Step>
MAELM_INLINE Step load(const BFloat16* p) {
  if constexpr (sizeof(Step) == 4) {
    return bits<float>(static_cast<uint32_t>(read<uint16_t>(p)) << 16);
  } else {
#ifdef __AVX2__  // GCC widens halves of it
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return bits<Vec>(_mm256_slli_epi32(wide, 16));
#else
    return bits<Vec>(__builtin_convertvector(read<HalfVec>(p), WordVec) << 16);
#endif
  }
}

template <class Step>
MAELM_INLINE Step load(const Half* p) {
  if constexpr (sizeof(Step) == 4) {
    return static_cast<float>(*p);
  } else {
#ifdef __F16C__
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    Vec wide;
    for (int lane = 0; lane < 8; ++lane) wide[lane] = static_cast<float>(p[lane]);
    return wide;
#endif
  }
}

template <class Step>
MAELM_INLINE void store(float* p, Step value) {
  std::memcpy(p, &value, sizeof(value));
}

// Rounds to nearest even; a NaN keeps being one.
template <class Step>
MAELM_INLINE void store(BFloat16* p, Step value) {
  if constexpr (sizeof(Step) == 4) {
    *p = BFloat16(value);
  } else {
    const WordVec word = bits<WordVec>(value);
    const WordVec rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
    const WordVec quiet = WordVec{} + 0x7FC0;
    const HalfVec half = __builtin_convertvector(value == value ? rounded : quiet, HalfVec);
    std::memcpy(static_cast<void*>(p), &half, sizeof(half));
  }
}

template <class Step>
MAELM_INLINE void store(Half* p, Step value) {
  if constexpr (sizeof(Step) == 4) {
    *p = Half(value);
  } else {
#ifdef __F16C__
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < 8; ++lane) p[lane] = Half(value[lane]);
#endif
  }
}

// value where the column's byte is not zero, else 0.
template <class Step>
MAELM_INLINE Step keep(Step value, const uint8_t* bytes) {
  if constexpr (sizeof(Step) == 4) {
    return *bytes ? value : 0.0f;
  } else {
#ifdef __AVX2__  // GCC takes the bytes one by one
    const IntVec wide = (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
#else
    const IntVec wide = __builtin_convertvector(read<ByteVec>(bytes), IntVec);
#endif
    return bits<Vec>(bits<WordVec>(value) & bits<WordVec>(wide));
  }
}

MAELM_INLINE float total(Vec v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

// A sum over a row. Four chains of additions, so that they need not wait for one another; their order is fixed.
struct Sum {
  Vec chain[4] = {};
  float rest = 0.0f;

  template <int kChain>
  MAELM_INLINE void add(Vec value) {
    chain[kChain] += value;
  }
  template <int kChain>
  MAELM_INLINE void add(float value) {
    rest += value;
  }
  float total() const { return maelm::total((chain[0] + chain[1]) + (chain[2] + chain[3])) + rest; }
};

template <class S, int kChain>
struct StepOf {
  using type = S;
  static constexpr int chain = kChain;
};

// f(step, column): step names the type of a step and the chain of Sum it adds to.
template <class F>
MAELM_INLINE void each(int64_t width, F&& f) {
  int64_t column = 0;
  for (; column + 32 <= width; column += 32) {
    f(StepOf<Vec, 0>{}, column);
    f(StepOf<Vec, 1>{}, column + 8);
    f(StepOf<Vec, 2>{}, column + 16);
    f(StepOf<Vec, 3>{}, column + 24);
  }
  for (; column + 8 <= width; column += 8) f(StepOf<Vec, 0>{}, column);
  for (; column < width; ++column) f(StepOf<float, 0>{}, column);
}

}  // namespace maelm
