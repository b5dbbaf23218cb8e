// Arithmetic that the C++ and the CUDA code of an op share, compiled by both: where a row starts, how rows are split
// into pieces whose sums have one order, and dropout's bits (maelm_fast/ops/reference/dropout.py says what they are).

#pragma once

#include <cmath>
#include <cstdint>

#include "../philox.h"

#ifdef __CUDACC__
#define MAELM_HD __host__ __device__ __forceinline__
#else
#define MAELM_HD inline
#endif

namespace maelm {

// Element at which `row` starts; rows * width may pass 2**31.
MAELM_HD int64_t row_offset(int64_t row, int64_t stride) { return row * stride; }

// Whether a decoder slot is filled by the [MASK] embedding, not by a row of the encoder.
MAELM_HD bool is_mask(int64_t source) { return source < 0; }

// First item of piece `piece` of `pieces` nearly equal ones.
MAELM_HD int64_t piece_begin(int64_t piece, int64_t pieces, int64_t items) { return piece * items / pieces; }

// Element `i` of an int32 or int64 tensor.
MAELM_HD int64_t index_at(const void* data, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

MAELM_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A 16-bit half below this drops its element. Rounds half to even, as Python's round() does.
inline uint32_t dropout_threshold(double p) { return static_cast<uint32_t>(std::nearbyint(p * 65536.0)); }

constexpr int kDropoutRounds = 7, kDropoutLanes = 8;  // eight columns share a block

// The half that decides about column `lane` of the block's eight.
MAELM_HD uint32_t dropout_half(const Block& block, int lane) {
  return (block.word[lane >> 1] >> (16 * (lane & 1))) & 0xFFFF;
}

}  // namespace maelm
