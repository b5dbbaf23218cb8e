// M_MMAP_MAX rather than M_MMAP_THRESHOLD: glibc refuses thresholds above 32 MiB, and activations are larger.
//
// Linux gives large pages to memory that asks for them, which the C library's heap does not: a piece of it that a step
// adds is a mapping of its own. So the heap grows once, by as much as a run may need, and asks for all of it. What is not
// touched takes no memory, unless the system promises none that it has not (vm.overcommit_memory 2): there it stays small.

#include "memory.h"

#include <cstdint>
#include <cstdlib>
#include <fstream>

#if defined(__GLIBC__)
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace maelm {

#if defined(__GLIBC__)
namespace {

bool takes_what_is_not_touched() {
  std::ifstream file("/proc/sys/vm/overcommit_memory");
  int mode = 0;
  return file >> mode && mode == 2;
}

void grow_with_large_pages() {
  if (takes_what_is_not_touched()) return;
  constexpr uintptr_t kLargePage = 2 << 20;
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return;
  const size_t bytes = static_cast<size_t>(pages) * static_cast<size_t>(page) / 2;
  void* block = std::malloc(bytes);
  if (block == nullptr) return;  // memory is limited; the heap grows as it did
  const uintptr_t first = (reinterpret_cast<uintptr_t>(block) + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(block) + bytes) / kLargePage * kLargePage;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  std::free(block);
}

}  // namespace
#endif

bool keep_freed_memory() {
#if defined(__GLIBC__)
  constexpr int kNever = -1, kTopPadBytes = 64 << 20;
  // No block is a mapping of its own, the heap's top is never given back, and the heap grows in large steps.
  const bool no_mappings = mallopt(M_MMAP_MAX, 0) == 1;
  const bool no_trimming = mallopt(M_TRIM_THRESHOLD, kNever) == 1;
  const bool large_steps = mallopt(M_TOP_PAD, kTopPadBytes) == 1;
  const bool kept = no_mappings && no_trimming && large_steps;
  if (kept) grow_with_large_pages();
  return kept;
#else
  return false;
#endif
}

}  // namespace maelm
