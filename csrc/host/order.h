// The order of a run's samples, as maelm_fast/data/order.py computes it, bit for bit.

#pragma once

#include <cstdint>

namespace maelm {

// ids[i]: the sample at place index[i] of an epoch's order of `size` samples. Each index lies in [0, size).
// half_bits: in [1, 32], half the width of the Feistel network, whose domain 4^half_bits is at least `size`.
void permute(const int64_t* index, int64_t count, int64_t size, int half_bits, int rounds, uint64_t seed,
             uint32_t epoch, int64_t* ids);

}  // namespace maelm
