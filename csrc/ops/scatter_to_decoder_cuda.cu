// The decoder's input on a GPU. A thread owns eight neighbouring columns; threadIdx.x runs along a row, threadIdx.y
// over rows. The backward pass gives a block all decoder slots of one position at a time, from a list built on the
// device (slots_by_position.h), so that no floating-point sum needs an atomic: the position table's row is the block's
// own, and what is summed over all slots is left in one partial sum a block. The list's order inside a position is that
// of arrival, or, if asked to be deterministic, that of the slots.
//
// Indices are not checked here: out of range, or an encoder row named twice, is the caller's error.

#include <cuda_runtime.h>

#include <tuple>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "slots_by_position.h"
#include "tensors.h"

namespace maelm {
namespace {

using BFloat16 = torch::headeronly::BFloat16;
using Half = torch::headeronly::Half;

constexpr const char* kOp = "scatter_to_decoder";
constexpr int kColumns = 8, kMaxThreads = 512, kRowThreads = 256;
constexpr int64_t kMaxWidth = kColumns * kMaxThreads;
enum { kMask, kWeight, kBias, kVectors };  // what is summed over all slots

// A row-major matrix of T or, beside rows of T, fp32.
struct Matrix {
  void* data;
  int64_t stride;  // elements
  bool single;     // fp32
};

struct Problem {
  Matrix encoder, table, out, grad_out, grad_encoder, grad_table;
  Index source, positions;                 // (N,)
  const float *mask, *weight, *bias;       // (width,)
  float *mean, *rstd, *partials;           // (N,), (N,), (blocks, kVectors, width)
  const int *list, *begin;                 // (N,) slots by position, (P + 1,) where a position's slots begin
  int64_t slots, table_rows;
  int width;
  bool aligned;  // rows start at multiples of 16 bytes and hold a multiple of eight columns
  float eps;
};

template <class T>
__device__ __forceinline__ void load_as(const T* row, int column, int width, bool aligned, float (&x)[kColumns]) {
  if (aligned && column < width) {
    alignas(16) T raw[kColumns];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(raw) / 16); ++i) {
      reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(row + column)[i];
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x[i] = static_cast<float>(raw[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x[i] = column + i < width ? static_cast<float>(row[column + i]) : 0.0f;
  }
}

template <class T>
__device__ __forceinline__ void store_as(T* row, int column, int width, bool aligned, const float (&x)[kColumns]) {
  if (aligned && column < width) {
    alignas(16) T raw[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) raw[i] = static_cast<T>(x[i]);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(raw) / 16); ++i) {
      reinterpret_cast<uint4*>(row + column)[i] = reinterpret_cast<const uint4*>(raw)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (column + i < width) row[column + i] = static_cast<T>(x[i]);
    }
  }
}

template <class T>
__device__ __forceinline__ void load_row(const Matrix& matrix, int64_t row, int column, const Problem& p,
                                         float (&x)[kColumns]) {
  const int64_t offset = row_offset(row, matrix.stride);
  if (matrix.single) {
    load_as(static_cast<const float*>(matrix.data) + offset, column, p.width, p.aligned, x);
  } else {
    load_as(static_cast<const T*>(matrix.data) + offset, column, p.width, p.aligned, x);
  }
}

template <class T>
__device__ __forceinline__ void store_row(const Matrix& matrix, int64_t row, int column, const Problem& p,
                                          const float (&x)[kColumns]) {
  const int64_t offset = row_offset(row, matrix.stride);
  if (matrix.single) {
    store_as(static_cast<float*>(matrix.data) + offset, column, p.width, p.aligned, x);
  } else {
    store_as(static_cast<T*>(matrix.data) + offset, column, p.width, p.aligned, x);
  }
}

// Sums of a and b over the threads of a row. Calls that follow one another use two buffers in turn: a thread writes one
// only after the barrier of the other, by when everyone has read it.
__device__ __forceinline__ float2 sum_over_row(float a, float b, float2* buffer) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    a += __shfl_xor_sync(0xFFFFFFFF, a, distance);
    b += __shfl_xor_sync(0xFFFFFFFF, b, distance);
  }
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return make_float2(a, b);
  float2* row = buffer + threadIdx.y * warps;
  if (threadIdx.x % kWarp == 0) row[threadIdx.x / kWarp] = make_float2(a, b);
  __syncthreads();
  float2 sum = make_float2(0.0f, 0.0f);
  for (int warp = 0; warp < warps; ++warp) {
    sum.x += row[warp].x;
    sum.y += row[warp].y;
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads) scatter_fwd_kernel(const Problem p) {
  __shared__ float2 sums[2][kMaxThreads / kWarp];
  const int column = threadIdx.x * kColumns;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool active = slot < p.slots;
  float x[kColumns] = {}, added[kColumns] = {};
  if (active) {
    const int64_t row = p.source.at(slot);
    if (is_mask(row)) {
      load_as(p.mask, column, p.width, p.aligned, x);
    } else {
      load_row<T>(p.encoder, row, column, p, x);
    }
    load_row<T>(p.table, p.positions.at(slot), column, p, added);
  }
  float total = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) total += x[i] += added[i];
  const float mean = sum_over_row(total, 0.0f, sums[0]).x / p.width;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    x[i] -= mean;
    if (column + i < p.width) squares += x[i] * x[i];
  }
  const float rstd = rsqrtf(sum_over_row(squares, 0.0f, sums[1]).x / p.width + p.eps);
  if (!active) return;
  float weight[kColumns], bias[kColumns];
  load_as(p.weight, column, p.width, p.aligned, weight);
  load_as(p.bias, column, p.width, p.aligned, bias);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) x[i] = x[i] * rstd * weight[i] + bias[i];
  store_row<T>(p.out, slot, column, p, x);
  if (threadIdx.x == 0) {
    p.mean[slot] = mean;
    p.rstd[slot] = rstd;
  }
}

// Adds what the block's rows of threads hold for one column; threads of the first row get the sum.
__device__ __forceinline__ void sum_over_rows(float (&x)[kColumns], float* buffer) {
  if (blockDim.y == 1) return;
  float* own = buffer + (threadIdx.y * blockDim.x + threadIdx.x) * kColumns;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) own[i] = x[i];
  __syncthreads();
  if (threadIdx.y == 0) {
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) x[i] += own[y * blockDim.x * kColumns + i];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads) scatter_bwd_kernel(const Problem p) {
  __shared__ float2 sums[2][kMaxThreads / kWarp];
  extern __shared__ float columns[];  // (blockDim.y, blockDim.x, kColumns)
  const int column = threadIdx.x * kColumns;
  float weight[kColumns], sum_mask[kColumns] = {}, sum_weight[kColumns] = {}, sum_bias[kColumns] = {};
  load_as(p.weight, column, p.width, p.aligned, weight);
  int turn = 0;
  for (int64_t position = blockIdx.x; position < p.table_rows; position += gridDim.x) {
    const int begin = p.begin[position], end = p.begin[position + 1];
    float sum_table[kColumns] = {}, added[kColumns];
    load_row<T>(p.table, position, column, p, added);
    for (int first = begin; first < end; first += blockDim.y) {  // every thread of the block takes part in every round
      const bool active = first + static_cast<int>(threadIdx.y) < end;
      float x[kColumns] = {}, grad[kColumns] = {};
      float mean = 0.0f, rstd = 0.0f, total = 0.0f, product = 0.0f;
      int64_t row = -1;
      if (active) {
        const int64_t slot = p.list[first + threadIdx.y];
        row = p.source.at(slot);
        mean = p.mean[slot];
        rstd = p.rstd[slot];
        load_row<T>(p.grad_out, slot, column, p, grad);
        if (is_mask(row)) {
          load_as(p.mask, column, p.width, p.aligned, x);
        } else {
          load_row<T>(p.encoder, row, column, p, x);
        }
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        x[i] = (x[i] + added[i] - mean) * rstd;
        sum_weight[i] += grad[i] * x[i];
        sum_bias[i] += grad[i];
        grad[i] *= weight[i];
        total += grad[i];
        product += grad[i] * x[i];
      }
      const float2 sum = sum_over_row(total, product, sums[turn]);
      turn ^= 1;
      if (!active) continue;
      const float offset = sum.x / p.width, slope = sum.y / p.width;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        x[i] = (grad[i] - offset - x[i] * slope) * rstd;
        sum_table[i] += x[i];
        if (is_mask(row)) sum_mask[i] += x[i];
      }
      if (!is_mask(row)) store_row<T>(p.grad_encoder, row, column, p, x);
    }
    sum_over_rows(sum_table, columns);
    if (threadIdx.y == 0) store_row<T>(p.grad_table, position, column, p, sum_table);
  }
  float* partial = p.partials + row_offset(blockIdx.x, kVectors * p.width);
  sum_over_rows(sum_mask, columns);
  sum_over_rows(sum_weight, columns);
  sum_over_rows(sum_bias, columns);
  if (threadIdx.y == 0) {
    store_as(partial + kMask * p.width, column, p.width, p.aligned, sum_mask);
    store_as(partial + kWeight * p.width, column, p.width, p.aligned, sum_weight);
    store_as(partial + kBias * p.width, column, p.width, p.aligned, sum_bias);
  }
}

template <class T>
__global__ void zero_unused_kernel(Problem p, const int* used, int64_t encoder_rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= encoder_rows || used[row]) return;
  const float zeros[kColumns] = {};
  for (int column = threadIdx.x * kColumns; column < p.width; column += kWarp * kColumns) {
    store_row<T>(p.grad_encoder, row, column, p, zeros);
  }
}

struct Sum {
  void* data;  // (width,)
  ScalarType type;
};

// The blocks' partial sums, added in order: threadIdx.x is a column, threadIdx.y a share of the blocks.
__global__ void total_kernel(const float* partials, int blocks, int width, Sum mask, Sum weight, Sum bias) {
  __shared__ float shares[8][kWarp];
  const int vector = blockIdx.y, column = blockIdx.x * kWarp + threadIdx.x;
  float sum = 0.0f;
  for (int block = threadIdx.y; block < blocks && column < width; block += blockDim.y) {
    sum += partials[row_offset(static_cast<int64_t>(block) * kVectors + vector, width) + column];
  }
  shares[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum += shares[y][threadIdx.x];
  const Sum to = vector == kMask ? mask : vector == kWeight ? weight : bias;
  if (to.type == ScalarType::Float) {
    static_cast<float*>(to.data)[column] = sum;
  } else if (to.type == ScalarType::BFloat16) {
    static_cast<BFloat16*>(to.data)[column] = BFloat16(sum);
  } else {
    static_cast<Half*>(to.data)[column] = Half(sum);
  }
}

Index index_of(const Tensor& tensor) { return {tensor.data_ptr(), tensor.scalar_type() == ScalarType::Long}; }

Matrix matrix_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.scalar_type() == ScalarType::Float};
}

bool is_aligned(const Tensor& tensor) {
  const bool pointer = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  return pointer && (tensor.dim() == 1 || tensor.stride(0) * bytes % 16 == 0);
}

template <class F>
void with_type(ScalarType type, F&& f) {
  if (type == ScalarType::BFloat16) {
    f(static_cast<BFloat16*>(nullptr));
  } else if (type == ScalarType::Half) {
    f(static_cast<Half*>(nullptr));
  } else {
    f(static_cast<float*>(nullptr));
  }
}

// The inputs in the form the kernels take; what was converted lives as long as this.
struct Inputs {
  Tensor encoder_out, source, mask, positions, table, weight, bias;
  Problem problem{};

  Inputs(const Tensor& encoder, const Tensor& source_map, const Tensor& mask_embedding, const Tensor& position_map,
         const Tensor& position_table, const Tensor& w, const Tensor& b) {
    for (const Tensor* tensor : {&source_map, &mask_embedding, &position_map, &position_table, &w, &b}) {
      require(tensor->is_cuda() && tensor->get_device_index() == encoder.get_device_index(), kOp,
              ": all tensors must be on one device");
    }
    require(encoder.dim() == 2, kOp, ": encoder_out must have shape (rows, width)");
    const int64_t width = encoder.size(1), slots = source_map.numel();
    require(width > 0 && width <= kMaxWidth, kOp, ": width must be from 1 to ", kMaxWidth, " on CUDA, not ", width);
    require(slots < (int64_t{1} << 31), kOp, ": at most 2**31 - 1 slots");
    encoder_out = row_major(encoder, kOp, "encoder_out", width);
    table = row_major(position_table, kOp, "position_table", width);
    require(table.scalar_type() == encoder.scalar_type() || table.scalar_type() == ScalarType::Float, kOp,
            ": position_table must be fp32 or have encoder_out's dtype");
    require_index(source_map, kOp, "source", slots);
    require_index(position_map, kOp, "positions", slots);
    source = torch::stable::contiguous(source_map);
    positions = torch::stable::contiguous(position_map);
    mask = parameter(mask_embedding, kOp, "mask_embedding", width);
    weight = parameter(w, kOp, "weight", width);
    bias = parameter(b, kOp, "bias", width);
    problem.encoder = matrix_of(encoder_out);
    problem.table = matrix_of(table);
    problem.source = index_of(source);
    problem.positions = index_of(positions);
    problem.mask = static_cast<const float*>(mask.data_ptr());
    problem.weight = static_cast<const float*>(weight.data_ptr());
    problem.bias = static_cast<const float*>(bias.data_ptr());
    problem.slots = slots;
    problem.table_rows = table.size(0);
    problem.width = static_cast<int>(width);
    problem.aligned = width % kColumns == 0 && is_aligned(encoder_out) && is_aligned(table) && is_aligned(mask) &&
                      is_aligned(weight) && is_aligned(bias);
  }
};

// Threads along a row, in whole warps, by rows.
dim3 block_shape(int64_t width) {
  const auto x = static_cast<unsigned>(ceil_div(width, kColumns * kWarp) * kWarp);
  return {x, x < kRowThreads ? kRowThreads / x : 1, 1};
}

unsigned blocks_for(int64_t items, int64_t of_block) { return static_cast<unsigned>(ceil_div(items, of_block)); }

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

std::tuple<Tensor, Tensor, Tensor> scatter_to_decoder_native_fwd(Tensor encoder_out, Tensor source,
                                                                 Tensor mask_embedding, Tensor positions,
                                                                 Tensor position_table, Tensor weight, Tensor bias,
                                                                 double eps) {
  const torch::stable::accelerator::DeviceGuard guard(encoder_out.get_device_index());
  Inputs in(encoder_out, source, mask_embedding, positions, position_table, weight, bias);
  Problem& p = in.problem;
  Tensor out = empty(encoder_out, {p.slots, p.width}, encoder_out.scalar_type());
  Tensor mean = empty(encoder_out, {p.slots}, ScalarType::Float);
  Tensor rstd = empty(encoder_out, {p.slots}, ScalarType::Float);
  p.out = matrix_of(out);
  p.mean = static_cast<float*>(mean.data_ptr());
  p.rstd = static_cast<float*>(rstd.data_ptr());
  p.eps = static_cast<float>(eps);
  if (p.slots > 0) {
    const dim3 block = block_shape(p.width);
    with_type(encoder_out.scalar_type(), [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      scatter_fwd_kernel<T><<<blocks_for(p.slots, block.y), block, 0, current_stream(encoder_out)>>>(p);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {out, mean, rstd};
}

// Gradients have the dtype of what they belong to; their sums are taken in fp32.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> scatter_to_decoder_native_bwd(
    Tensor grad_out, Tensor encoder_out, Tensor source, Tensor mask_embedding, Tensor positions, Tensor position_table,
    Tensor weight, Tensor bias, Tensor mean, Tensor rstd, bool deterministic) {
  const torch::stable::accelerator::DeviceGuard guard(encoder_out.get_device_index());
  const cudaStream_t stream = current_stream(encoder_out);
  Inputs in(encoder_out, source, mask_embedding, positions, position_table, weight, bias);
  Problem& p = in.problem;
  const int64_t width = p.width, encoder_rows = encoder_out.size(0);
  grad_out = row_major(grad_out, kOp, "grad_out", width);
  require(grad_out.size(0) == p.slots && grad_out.scalar_type() == encoder_out.scalar_type(), kOp,
          ": grad_out must have ", p.slots, " rows and encoder_out's dtype");
  Tensor grad_encoder = empty(encoder_out, {encoder_rows, width}, encoder_out.scalar_type());
  Tensor grad_table = empty(encoder_out, {p.table_rows, width}, position_table.scalar_type());
  Tensor grad_mask = empty(encoder_out, {width}, mask_embedding.scalar_type());
  Tensor grad_weight = empty(encoder_out, {width}, weight.scalar_type());
  Tensor grad_bias = empty(encoder_out, {width}, bias.scalar_type());

  int multiprocessors = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount,
                                        encoder_out.get_device_index()));
  const int64_t most = 4 * static_cast<int64_t>(multiprocessors);
  const int64_t blocks = p.table_rows < most ? p.table_rows : most;
  Tensor zeroed = torch::stable::new_zeros(encoder_out, {p.table_rows + encoder_rows}, ScalarType::Int);
  Tensor scratch = empty(encoder_out, {p.table_rows + 1 + p.table_rows + p.slots}, ScalarType::Int);
  Tensor partials = empty(encoder_out, {blocks, kVectors, width}, ScalarType::Float);
  int* counts = static_cast<int*>(zeroed.data_ptr());
  int* used = counts + p.table_rows;
  int* begin = static_cast<int*>(scratch.data_ptr());
  int* next = begin + p.table_rows + 1;
  int* list = next + p.table_rows;

  p.grad_out = matrix_of(grad_out);
  p.grad_encoder = matrix_of(grad_encoder);
  p.grad_table = matrix_of(grad_table);
  p.mean = static_cast<float*>(mean.data_ptr());
  p.rstd = static_cast<float*>(rstd.data_ptr());
  p.partials = static_cast<float*>(partials.data_ptr());
  p.list = list;
  p.begin = begin;
  p.aligned = p.aligned && is_aligned(grad_out);

  constexpr int kThreads = 256;
  if (p.slots > 0) {
    count_kernel<<<blocks_for(p.slots, kThreads), kThreads, 0, stream>>>(p.source, p.positions, p.slots, counts, used);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  begin_kernel<<<1, 1024, 0, stream>>>(counts, p.table_rows, begin, next);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (p.slots > 0 && deterministic) {
    list_in_order_kernel<<<blocks_for(p.table_rows, 4), dim3(kWarp, 4), 0, stream>>>(p.positions, p.slots, p.table_rows,
                                                                                     begin, list);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  } else if (p.slots > 0) {
    list_by_arrival_kernel<<<blocks_for(p.slots, kThreads), kThreads, 0, stream>>>(p.positions, p.slots, next, list);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  const dim3 block = block_shape(width);
  const size_t shared = block.y == 1 ? 0 : block.x * block.y * kColumns * sizeof(float);
  with_type(encoder_out.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (encoder_rows > 0) {
      zero_unused_kernel<T><<<blocks_for(encoder_rows, 8), dim3(kWarp, 8), 0, stream>>>(p, used, encoder_rows);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
    if (blocks > 0) {
      scatter_bwd_kernel<T><<<static_cast<unsigned>(blocks), block, shared, stream>>>(p);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
  total_kernel<<<dim3(blocks_for(width, kWarp), kVectors), dim3(kWarp, 8), 0, stream>>>(
      p.partials, static_cast<int>(blocks), p.width, {grad_mask.data_ptr(), mask_embedding.scalar_type()},
      {grad_weight.data_ptr(), weight.scalar_type()}, {grad_bias.data_ptr(), bias.scalar_type()});
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {grad_encoder, grad_mask, grad_table, grad_weight, grad_bias};
}

}  // namespace
}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CUDA, library) {
  library.impl("scatter_to_decoder_native_fwd", TORCH_BOX(&maelm::scatter_to_decoder_native_fwd));
  library.impl("scatter_to_decoder_native_bwd", TORCH_BOX(&maelm::scatter_to_decoder_native_bwd));
}
