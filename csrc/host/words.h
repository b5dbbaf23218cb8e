// The random words of masks and sample order, those of maelm_fast/philox.py: ten rounds, counter (block, sample, epoch,
// stream), key the two halves of a 64-bit seed.

#pragma once

#include <cstdint>

#include "../philox.h"

namespace maelm {

// What a word is drawn for. The values are those of maelm_fast.philox.Stream.
enum class Stream : uint32_t { kMask = 0, kRounding = 1, kPolicy = 2, kReplacement = 3, kOrder = 4 };

MAELM_PHILOX Block draw_block(uint32_t block, uint32_t sample, uint32_t epoch, Stream stream, uint64_t seed) {
  return philox4x32<10>({{block, sample, epoch, static_cast<uint32_t>(stream)}}, seed);
}

}  // namespace maelm
