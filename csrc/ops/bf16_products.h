// Products of bf16 matrices with fp32 sums, for CPUs that multiply pairs of bf16 (AVX-512 BF16).
//
// A word is two bf16 that are multiplied and added together: neighbours along the depth, the index that is summed over.
// The left operand is read word by word, eight rows at a time. The right one is packed first, for each call anew, into
// panels of 48 columns: [panel][word of the depth][column]. It may be fp32, which is rounded on the way, so that
// parameters need no bf16 copy that could be out of date, and packing takes no longer than such a copy would.

#pragma once

#include <cstdint>

#include "tensors.h"
#include "vec.h"

namespace maelm {

// Whether this CPU has the instructions, and is no faster with others: AMX, which PyTorch's oneDNN uses.
bool fast_bf16_products();

// (rows, columns) of fp32 or bf16; columns lie side by side.
struct Matrix {
  const char* data;
  int64_t stride;  // elements from row to row
  bool wide;       // fp32
  explicit Matrix(const Tensor& tensor)
      : data(static_cast<const char*>(tensor.data_ptr())),
        stride(tensor.stride(0)),
        wide(tensor.scalar_type() == ScalarType::Float) {}
  const char* at(int64_t row, int64_t column) const { return data + (row * stride + column) * (wide ? 4 : 2); }
};

// The left operand: rows of bf16, an even number of columns; or panels of eight rows, which pack_left has made.
struct Left {
  const char* data;
  int64_t stride;  // words from row to row
  bool panels;
};

// What becomes of the sums. They are rounded to bf16, but kept in the last two.
enum class Finish {
  kPlain,         // out = sum + bias
  kGelu,          // out = sum + bias; activated = gelu(out)
  kGeluBackward,  // out = sum * gelu'(before); activated = gelu(before)
  kWide,          // out, in fp32, = sum, or out + sum
  kWideTransposed,  // the same of out's transpose
};

struct Target {
  Finish finish = Finish::kPlain;
  void* out = nullptr;
  int64_t stride = 0;  // elements from row to row, of all four
  const float* bias = nullptr;
  BFloat16* activated = nullptr;
  const BFloat16* before = nullptr;
  bool add = false;
};

// left (rows, depth) times right (depth, columns), or, if transposed, times the transpose of right (columns, depth).
// sums, unless null: (columns,), which the sums of right's columns are added to; right is bf16 then.
void multiply(const Left& left, const Matrix& right, bool transposed, const Target& to, int64_t rows, int64_t depth,
              int64_t columns, float* sums = nullptr);

// out (rows, columns), fp32, = left^T right, for bf16 left (depth, rows) and right (depth, columns). sums: (rows,), the
// sums of left's columns.
void multiply_transposed(const Matrix& left, const Matrix& right, float* out, float* sums, int64_t rows, int64_t depth,
                         int64_t columns);

}  // namespace maelm
