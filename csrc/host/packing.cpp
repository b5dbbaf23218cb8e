// Best fit: open bins are the keys of a balanced tree, ordered by what is left in them and then by number: the first
// key at or after (length, 0) is the fullest bin that fits, ties broken. A bin that takes an item moves within the tree
// without being allocated anew, and a full one leaves it.

#include "packing.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <set>
#include <utility>
#include <vector>

namespace maelm {
namespace {

// A value and a number as one key, in lexicographic order.
uint64_t key(int64_t value, uint32_t number) { return static_cast<uint64_t>(value) << 32 | number; }

// The items, each as the lower half of its key, the longest first.
std::vector<uint64_t> longest_first(const int64_t* lengths, int64_t count, int64_t budget) {
  std::vector<uint64_t> items(count);
  for (int64_t i = 0; i < count; ++i) items[i] = key(budget - lengths[i], static_cast<uint32_t>(i));
  std::sort(items.begin(), items.end());
  return items;
}

// Returns the number of bins.
int64_t best_fit(const std::vector<uint64_t>& items, const int64_t* lengths, int64_t budget, int32_t* bins) {
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

}  // namespace

int64_t best_fit(const int64_t* lengths, int64_t count, int64_t budget, int32_t* bins) {
  return best_fit(longest_first(lengths, count, budget), lengths, budget, bins);
}

int64_t spread(const int64_t* lengths, int64_t count, int64_t budget, int32_t* bins) {
  const std::vector<uint64_t> items = longest_first(lengths, count, budget);
  const int64_t opened = best_fit(items, lengths, budget, bins);
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<uint64_t>> emptiest;
  for (int64_t bin = 0; bin < opened; ++bin) emptiest.push(key(0, static_cast<uint32_t>(bin)));
  std::vector<int32_t> even(count);
  for (const uint64_t item_key : items) {
    const auto item = static_cast<uint32_t>(item_key);
    const uint64_t filled = emptiest.top() + key(lengths[item], 0);
    if (static_cast<int64_t>(filled >> 32) > budget) return opened;
    emptiest.pop();
    emptiest.push(filled);
    even[item] = static_cast<int32_t>(filled & 0xFFFFFFFF);
  }
  std::copy(even.begin(), even.end(), bins);
  return opened;
}

}  // namespace maelm
