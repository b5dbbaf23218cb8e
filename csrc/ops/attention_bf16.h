// Attention of bf16 tensors on a CPU with AVX-512's bf16 products; and which AVX-512 there is.

#pragma once

#include <vector>

#include "attention_call.h"

namespace maelm {

// Whether the CPU has it; PyTorch's ATEN_CPU_CAPABILITY=avx2 turns it off here too.
bool has_avx512();
bool has_bf16_products();

// out (queries, heads, dim) and lse (heads, queries), of a call in bf16.
void bf16_forward(const Call& call, const Tensor& out, const Tensor& lse);
// each_backward, in bf16.
std::vector<double> bf16_backward(const Call& call, const BackwardTensors& tensors, int64_t line_width);

}  // namespace maelm
