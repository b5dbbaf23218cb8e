// What the row-wise CPU ops are made of: passes over one row, which lies in a thread's fp32 buffer (it stays in the L1
// cache), and the bookkeeping that makes sums over rows independent of the number of threads.

#pragma once

#include <cstdint>
#include <vector>

#include "index.h"
#include "tensors.h"

namespace maelm {

// Rows of a CPU tensor of fp32, bf16 or fp16. Does not own it.
class Rows {
 public:
  explicit Rows(const Tensor& tensor)  // (rows, width), or (width,): the same row always
      : data_(static_cast<char*>(tensor.data_ptr())),
        type_(tensor.scalar_type()),
        stride_(tensor.dim() == 1 ? 0 : tensor.stride(0) * static_cast<int64_t>(tensor.element_size())) {}

  ScalarType type() const { return type_; }
  char* row(int64_t index) const { return data_ + row_offset(index, stride_); }

 private:
  char* data_;
  ScalarType type_;
  int64_t stride_;  // bytes
};

struct Moments {
  float mean, rstd;
};

// Bytes that are 0 where dropout zeroes a column, and the factor for the others. keep is null without dropout.
struct Dropped {
  const uint8_t* keep = nullptr;
  float scale = 1.0f;
};

// A row in fp32: the tensor's own memory if it has that type, else widened into `buffer`.
const float* view(const Rows& rows, int64_t row, float* buffer, int64_t width);
void store_row(const Rows& rows, int64_t row, const float* x, int64_t width);
void add_rows(float* out, const float* a, const float* b, int64_t width);
void accumulate(float* total, const float* x, int64_t width);
void drop(float* out, const float* x, Dropped dropped, int64_t width);

// total = residual + dropout(x), rows of any type, in one pass. Returns the sum over the columns.
float add_dropped(float* total, const Rows& x, const Rows& residual, int64_t row, Dropped dropped, int64_t width);
// dropout(x), with a mask, into a row of `out`.
void store_dropped(const Rows& out, int64_t row, const float* x, Dropped dropped, int64_t width);

Moments moments(const float* x, int64_t width, double eps);
Moments moments(const float* x, int64_t width, double eps, float sum);
// dropout((x - mean) * rstd * weight + bias) into a row of `out`.
void normalise(const Rows& out, int64_t row, const float* x, Moments moments, const float* weight, const float* bias,
               Dropped dropped, int64_t width);
// x becomes the gradient of LayerNorm's input; grad_weight and grad_bias are added to.
void norm_backward(float* x, const float* grad, Moments moments, const float* weight, float* grad_weight,
                   float* grad_bias, int64_t width);

// Sums over rows are taken in at most kPieces pieces, whose number depends on the number of rows only; a piece is one
// thread's work, and the pieces' sums are added in order.
constexpr int64_t kPieces = 64, kRowsOfPiece = 16, kGrain = 16;

inline int64_t pieces_of(int64_t rows) {
  const int64_t wanted = ceil_div(rows, kRowsOfPiece);
  return wanted < 1 ? 1 : wanted > kPieces ? kPieces : wanted;
}

// Zeroed fp32 vectors, `vectors` for each piece.
class Partials {
 public:
  Partials(int64_t pieces, int64_t vectors, int64_t width)
      : pieces_(pieces), vectors_(vectors), width_(width), data_(static_cast<size_t>(pieces * vectors * width)) {}
  float* at(int64_t piece, int64_t vector) { return data_.data() + (piece * vectors_ + vector) * width_; }
  // The sum of one vector over the pieces, as a (width,) tensor of the given dtype.
  Tensor total(int64_t vector, const Tensor& like, ScalarType type);

 private:
  int64_t pieces_, vectors_, width_;
  std::vector<float> data_;
};

// An index tensor as int64, checked to lie in [low, high).
std::vector<int64_t> checked_index(const Tensor& index, int64_t low, int64_t high, const char* op, const char* name,
                                   const char* bound);

// Rows of a batch in the order of the table row they name: the rows that name r are rows[begin[r]] ...
// rows[begin[r+1]-1], ascending. A piece of work is a range of table rows, so that nobody else adds to them.
struct ByTableRow {
  std::vector<int64_t> begin;  // (table_rows + 1,)
  std::vector<int64_t> rows;   // (N,)

  ByTableRow(const std::vector<int64_t>& index, int64_t table_rows);
  int64_t table_rows() const { return static_cast<int64_t>(begin.size()) - 1; }
  // First table row of a piece: pieces are equal in table rows plus the batch's rows that name them.
  int64_t piece_row(int64_t piece, int64_t pieces) const;
};

}  // namespace maelm
