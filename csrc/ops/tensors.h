// Tensors as the row loops see them, and the checks every op makes. Only torch's stable ABI is used.

#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace maelm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Raises a RuntimeError whose first line is the message alone.
template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  ((message << parts), ...);
  throw std::runtime_error(message.str());
}

inline bool is_float(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

inline bool is_index(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Int || tensor.scalar_type() == ScalarType::Long;
}

inline Tensor empty(const Tensor& like, std::vector<int64_t> shape, ScalarType type) {
  return torch::stable::new_empty(like, shape, type);
}

inline Tensor fp32(const Tensor& tensor) {
  return torch::stable::contiguous(torch::stable::to(tensor, ScalarType::Float));
}

// A (rows, width) tensor whose columns lie next to one another; rows may lie apart (a slice of a larger tensor).
inline Tensor row_major(const Tensor& tensor, const char* op, const char* name, int64_t width) {
  require(is_float(tensor), op, ": ", name, " must be fp32, bf16 or fp16");
  require(tensor.dim() == 2 && tensor.size(1) == width, op, ": ", name, " must have shape (rows, ", width, ")");
  return tensor.size(1) <= 1 || tensor.stride(1) == 1 ? tensor : torch::stable::contiguous(tensor);
}

// A (width,) parameter in fp32.
inline Tensor parameter(const Tensor& tensor, const char* op, const char* name, int64_t width) {
  require(is_float(tensor), op, ": ", name, " must be fp32, bf16 or fp16");
  require(tensor.dim() == 1 && tensor.size(0) == width, op, ": ", name, " must have shape (", width, ",)");
  return fp32(tensor);
}

inline void require_index(const Tensor& tensor, const char* op, const char* name, int64_t rows) {
  require(is_index(tensor), op, ": ", name, " must be int32 or int64");
  require(tensor.dim() == 1 && tensor.size(0) == rows, op, ": ", name, " must have shape (", rows, ",)");
}

}  // namespace maelm
