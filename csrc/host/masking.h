// Masks drawn and sequences packed on the host: what maelm_fast/ops/reference/mask_and_pack.py computes, bit for bit.
//
// In two steps, because the sizes of the result follow from the masks: `choose` decides what becomes of every token,
// the caller allocates, `compact` fills. No Python and no torch in here.
//
// Shapes: S sequences, N tokens in all, T of them in the encoder's row, M masked.

#pragma once

#include <cstdint>
#include <vector>

namespace maelm {

// What the masked tokens become: kMask: [MASK]; kBert: 80% [MASK], 10% random, the rest unchanged; kRandom: random.
enum class Policy { kMask, kBert, kRandom };

struct MaskingOptions {
  double rate;
  bool stochastic;      // how many: floor(rate * n + u), else floor(rate * n + 1/2)
  bool special_tokens;  // whether special tokens may be masked
  Policy policy;
  double shown;  // of m [MASK] floor(shown * m + 1/2) stay in the encoder's row; 0 or 1 unless the policy is kMask
  int64_t vocab_size;
  int64_t mask_id;
  std::vector<int64_t> special;  // ascending, without repeats, in [0, vocab_size); all of it only with Policy::kMask
  uint64_t seed;
};

// S sequences one after another. Token: uint16_t, uint32_t, int32_t or int64_t.
template <typename Token>
struct Sequences {
  const Token* ids;        // (N,) each in [0, vocab_size)
  const int64_t* lengths;  // (S,) none negative, summing to N < 2^31
  const int64_t* samples;  // (S,) each in [0, 2^32)
  const int64_t* epochs;   // (S,) each in [0, 2^32)
  int64_t count;           // S
};

// What becomes of a token. All but kVisible are predicted; all but kRemoved have a place in the encoder's row.
enum Fate : uint8_t { kVisible = 0, kRemoved = 1, kMask = 2, kUnchanged = 3, kRandom = 4 };

struct Choice {
  std::vector<uint8_t> fates;         // (N,)
  std::vector<int32_t> replacements;  // the tokens that stand for the kRandom ones, in their order
  std::vector<int32_t> visible;       // (S,) tokens in the encoder's row
  std::vector<int32_t> masked;        // (S,) tokens to predict
  int64_t tokens = 0, visible_tokens = 0, masked_tokens = 0;  // N, T, M
};

// The tensors of maelm_fast.batch.PackedBatch.
struct PackedArrays {
  int32_t* ids;                 // (T,)
  int32_t* source;              // (N,)
  int32_t* masked_index;        // (M,)
  int32_t* labels;              // (M,)
  int32_t* visible_cu_seqlens;  // (S + 1,)
  int32_t* visible_positions;   // (T,)
  int32_t* decoder_cu_seqlens;  // (S + 1,)
  int32_t* decoder_positions;   // (N,)
  int32_t* masked_cu_seqlens;   // (S + 1,)
  int32_t* masked_positions;    // (M,)
};

template <typename Token>
Choice choose(const Sequences<Token>& sequences, const MaskingOptions& options);

template <typename Token>
void compact(const Sequences<Token>& sequences, const MaskingOptions& options, const Choice& choice, PackedArrays out);

}  // namespace maelm
