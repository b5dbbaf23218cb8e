// A Feistel network shuffles a power of four; a value that falls outside the samples is sent through it again.

#include "order.h"

#include "words.h"

namespace maelm {

void permute(const int64_t* index, int64_t count, int64_t size, int half_bits, int rounds, uint64_t seed,
             uint32_t epoch, int64_t* ids) {
  const uint64_t low = (uint64_t{1} << half_bits) - 1;
  for (int64_t i = 0; i < count; ++i) {
    auto value = static_cast<uint64_t>(index[i]);
    do {
      uint64_t left = value >> half_bits, right = value & low;
      for (uint32_t round = 0; round < static_cast<uint32_t>(rounds); ++round) {
        const Block drawn = draw_block(static_cast<uint32_t>(right), round, epoch, Stream::kOrder, seed);
        const uint64_t mixed = left ^ (drawn.word[0] & low);
        left = right;
        right = mixed;
      }
      value = left << half_bits | right;
    } while (value >= static_cast<uint64_t>(size));
    ids[i] = static_cast<int64_t>(value);
  }
}

}  // namespace maelm
