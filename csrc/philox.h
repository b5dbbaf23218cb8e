// Philox4x32, the same words as maelm_fast/philox.py; compiled by the host code, by the ops and by CUDA. Salmon et al.,
// "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
//
// A block is a pure function of its counter and is always inlined, so that a loop over blocks becomes SIMD code.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MAELM_PHILOX __host__ __device__ __forceinline__
#else
#define MAELM_PHILOX inline __attribute__((always_inline))
#endif

namespace maelm {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;

struct Block {
  uint32_t word[4];
};

template <int kRounds>
MAELM_PHILOX Block philox4x32(Block counter, uint64_t seed) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t high = static_cast<uint64_t>(kPhiloxMultiplier0) * c0;
    const uint64_t low = static_cast<uint64_t>(kPhiloxMultiplier1) * c2;
    c0 = static_cast<uint32_t>(low >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(low);
    c2 = static_cast<uint32_t>(high >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(high);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace maelm
