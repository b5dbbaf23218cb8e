// M_MMAP_MAX rather than M_MMAP_THRESHOLD: glibc refuses thresholds above 32 MiB, and activations are larger.

#include "memory.h"

#include <cstdlib>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace maelm {

bool keep_freed_memory() {
#if defined(__GLIBC__)
  constexpr int kNever = -1, kTopPadBytes = 64 << 20;
  // No block is a mapping of its own, the heap's top is never given back, and the heap grows in large steps.
  const bool no_mappings = mallopt(M_MMAP_MAX, 0) == 1;
  const bool no_trimming = mallopt(M_TRIM_THRESHOLD, kNever) == 1;
  const bool large_steps = mallopt(M_TOP_PAD, kTopPadBytes) == 1;
  return no_mappings && no_trimming && large_steps;
#else
  return false;
#endif
}

}  // namespace maelm
