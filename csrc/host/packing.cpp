// Open bins are the keys of a balanced tree, ordered by what is left in them and then by number: the first key at or
// after (length, 0) is the fullest bin that fits, ties broken. A bin that takes an item moves within the tree without
// being allocated anew, and a full one leaves it.

#include "packing.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace maelm {
namespace {

// A value and a number as one key, in lexicographic order.
uint64_t key(int64_t value, uint32_t number) { return static_cast<uint64_t>(value) << 32 | number; }

}  // namespace

int64_t best_fit(const int64_t* lengths, int64_t count, int64_t budget, int32_t* bins) {
  std::vector<uint64_t> items(count);
  for (int64_t i = 0; i < count; ++i) items[i] = key(budget - lengths[i], static_cast<uint32_t>(i));
  std::sort(items.begin(), items.end());

  std::set<uint64_t> open;
  int64_t opened = 0;
  for (const uint64_t item_key : items) {
    const auto item = static_cast<uint32_t>(item_key);
    const int64_t length = lengths[item];
    const auto found = open.lower_bound(key(length, 0));
    if (found == open.end()) {
      bins[item] = static_cast<int32_t>(opened);
      if (length < budget) open.insert(key(budget - length, static_cast<uint32_t>(opened)));
      ++opened;
    } else {
      bins[item] = static_cast<int32_t>(*found & 0xFFFFFFFF);
      const uint64_t left = *found - key(length, 0);
      if (left >> 32 == 0) {
        open.erase(found);
      } else {
        auto node = open.extract(found);
        node.value() = left;
        open.insert(std::move(node));
      }
    }
  }
  return opened;
}

}  // namespace maelm
