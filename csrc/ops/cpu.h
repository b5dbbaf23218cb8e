// Which wide instructions this CPU has. The extension is compiled for AVX2; functions beyond it carry a target of their
// own, and these say whether they may be called. PyTorch's ATEN_CPU_CAPABILITY=avx2 turns them off here too.

#pragma once

namespace maelm {

bool has_avx512();
bool has_bf16_products();  // AVX-512 BF16
bool has_amx();            // tiles of bf16 too, several times as fast

}  // namespace maelm
