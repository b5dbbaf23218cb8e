// Bin packing: whole documents into token budgets.

#pragma once

#include <cstdint>

namespace maelm {

// Packs items into bins of `budget`: the longest item first (ties: the lower index), each into the fullest bin it still
// fits in (ties: the lowest bin number), else into a new bin. O(count log count).
//
// lengths: (count,) each in [1, budget], budget < 2^31, count < 2^31. bins: (count,) out, the bin of each item.
// Returns the number of bins.
int64_t best_fit(const int64_t* lengths, int64_t count, int64_t budget, int32_t* bins);

// As many bins as best_fit needs, evenly full: the longest item first (ties: the lower index), each into the emptiest
// bin (ties: the lowest bin number). Where that would take a bin over the budget, what best_fit does. Arguments as for
// best_fit.
int64_t spread(const int64_t* lengths, int64_t count, int64_t budget, int32_t* bins);

}  // namespace maelm
