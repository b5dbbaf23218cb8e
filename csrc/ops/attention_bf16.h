// Attention of bf16 tensors on a CPU with AVX-512's bf16 products.

#pragma once

#include <vector>

#include "attention_call.h"

namespace maelm {

// out (queries, heads, dim) and lse (heads, queries), of a call in bf16.
void bf16_forward(const Call& call, const Tensor& out, const Tensor& lse);
// each_backward, in bf16.
std::vector<double> bf16_backward(const Call& call, const BackwardTensors& tensors, int64_t line_width);

}  // namespace maelm
