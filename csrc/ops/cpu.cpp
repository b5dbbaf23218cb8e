#include "cpu.h"

#include <cstdlib>
#include <cstring>

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace maelm {

#ifdef __x86_64__
namespace {

bool allowed() {
  const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
  return limit == nullptr || std::strcmp(limit, "avx512") == 0;
}

}  // namespace

bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && allowed();
  return has;
}

bool has_bf16_products() {
  static const bool has = has_avx512() && __builtin_cpu_supports("avx512bf16");
  return has;
}

bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
}
#else
bool has_avx512() { return false; }
bool has_bf16_products() { return false; }
bool has_amx() { return false; }
#endif

}  // namespace maelm
