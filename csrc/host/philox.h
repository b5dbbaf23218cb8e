// Philox4x32-10, the same words as maelm_fast/philox.py: counter (position / 4, sample, epoch, stream), key the two
// halves of a 64-bit seed. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
//
// A block is a pure function of its counter and is always inlined, so that a loop over blocks becomes SIMD code.

#pragma once

#include <cstdint>

namespace maelm {

// What a word is drawn for. The values are those of maelm_fast.philox.Stream.
enum class Stream : uint32_t { kMask = 0, kRounding = 1, kPolicy = 2, kReplacement = 3, kOrder = 4 };

struct Block {
  uint32_t word[4];
};

inline __attribute__((always_inline)) Block philox4x32(Block counter, uint64_t seed) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  constexpr int kRounds = 10;
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t high = kMultiplier0 * c0, low = kMultiplier1 * c2;
    c0 = static_cast<uint32_t>(low >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(low);
    c2 = static_cast<uint32_t>(high >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(high);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace maelm
