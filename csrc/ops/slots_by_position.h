// CUDA: the decoder's slots by position, a list built on the device. Its order inside a position is that of arrival
// (atomic counters), or that of the slots, which costs a scan of the map for each position.

#pragma once

#include <cstdint>

#include "index.h"

namespace maelm {
namespace {

constexpr int kWarp = 32;

struct Index {
  const void* data;  // (N,) int32 or int64
  bool wide;
  __device__ int64_t at(int64_t i) const { return index_at(data, wide, i); }
};

// Slots of each position, and which encoder rows some slot names.
__global__ void count_kernel(Index source, Index positions, int64_t slots, int* counts, int* used) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (slot >= slots) return;
  atomicAdd(counts + positions.at(slot), 1);
  const int64_t row = source.at(slot);
  if (!is_mask(row)) used[row] = 1;
}

// begin[i] = counts[0] + ... + counts[i - 1], by one block; next starts as begin.
__global__ void __launch_bounds__(1024) begin_kernel(const int* counts, int64_t table_rows, int* begin, int* next) {
  __shared__ int warp_sums[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int before = 0;
  for (int64_t first = 0; first < table_rows; first += blockDim.x) {
    const int64_t i = first + threadIdx.x;
    const int count = i < table_rows ? counts[i] : 0;
    int sum = count;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFF, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == kWarp - 1) warp_sums[warp] = sum;
    __syncthreads();
    int earlier = before, all = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) {
      if (w < warp) earlier += warp_sums[w];
      all += warp_sums[w];
    }
    if (i < table_rows) begin[i] = next[i] = earlier + sum - count;
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) begin[table_rows] = before;
}

__global__ void list_by_arrival_kernel(Index positions, int64_t slots, int* next, int* list) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (slot < slots) list[atomicAdd(next + positions.at(slot), 1)] = static_cast<int>(slot);
}

// A warp looks through all slots for those of its position.
__global__ void list_in_order_kernel(Index positions, int64_t slots, int64_t table_rows, const int* begin, int* list) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (position >= table_rows) return;
  const int stop = begin[position + 1];
  int next = begin[position];
  for (int64_t first = 0; first < slots && next < stop; first += kWarp) {
    const int64_t slot = first + threadIdx.x;
    const unsigned found = __ballot_sync(0xFFFFFFFF, slot < slots && positions.at(slot) == position);
    const unsigned below = found & ((1u << threadIdx.x) - 1);
    if (found >> threadIdx.x & 1) list[next + __popc(below)] = static_cast<int>(slot);
    next += __popc(found);
  }
}

}  // namespace
}  // namespace maelm
