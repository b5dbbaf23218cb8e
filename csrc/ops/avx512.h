// For functions compiled for AVX-512 BF16, which the extension is not: only a CPU that has it (cpu.h) may call them.

#pragma once

#include <immintrin.h>

#include "vec.h"

#define MAELM_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

namespace maelm {

// exp(score - shift) of what is at most 88; 0 where the result would not be normal. NaN stays NaN. The difference is taken
// first: it is exact where one weight is nearly 1, whatever the size of the score.
MAELM_BF16 MAELM_INLINE __m512 exponential(__m512 score, __m512 shift) {
  const __m512 x = _mm512_mul_ps(_mm512_sub_ps(score, shift), _mm512_set1_ps(1.44269504f));
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.32647203e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.67151299e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55073358e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40222424e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93147004e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(normal, p, n);
}

}  // namespace maelm
