// Philox in AVX2 lanes (a lane is a block), and keep_weights, which writes out the masks of attention weights.

#include "dropout.h"

#include <cstring>

#include "cpu.h"
#include "vec.h"

namespace maelm {
namespace {

#ifdef __AVX2__
struct Words {
  __m256i low, high;
};

// The two 32-bit halves of eight 64-bit products.
MAELM_INLINE Words multiply(__m256i a, uint32_t multiplier) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(multiplier));
  const __m256i even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
  return {_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA),
          _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA)};
}

// 255 in the bytes of 64 columns that are kept; `threshold` is below 2**16.
MAELM_INLINE void draw_64(uint8_t* bytes, uint32_t group, uint32_t row, uint32_t place, uint32_t part, uint64_t seed,
                          uint32_t threshold) {
  __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(group)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i c1 = _mm256_set1_epi32(static_cast<int>(row)), c2 = _mm256_set1_epi32(static_cast<int>(place));
  __m256i c3 = _mm256_set1_epi32(static_cast<int>(part));
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kDropoutRounds; ++round) {
    const Words first = multiply(c0, kPhiloxMultiplier0), second = multiply(c2, kPhiloxMultiplier1);
    c0 = _mm256_xor_si256(_mm256_xor_si256(second.high, c1), _mm256_set1_epi32(static_cast<int>(k0)));
    c1 = second.low;
    c2 = _mm256_xor_si256(_mm256_xor_si256(first.high, c3), _mm256_set1_epi32(static_cast<int>(k1)));
    c3 = first.low;
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  const __m256i limit = _mm256_set1_epi16(static_cast<int16_t>(threshold));
  const auto at_least = [&](__m256i halves) { return _mm256_cmpeq_epi16(_mm256_max_epu16(halves, limit), halves); };
  // A 128-bit lane holds four blocks, two halves each, word by word; blocks have to follow one another instead.
  const __m256i words02 = _mm256_packs_epi16(at_least(c0), at_least(c2));
  const __m256i words13 = _mm256_packs_epi16(at_least(c1), at_least(c3));
  const __m256i words01 = _mm256_unpacklo_epi16(words02, words13), words23 = _mm256_unpackhi_epi16(words02, words13);
  const __m256i front = _mm256_unpacklo_epi32(words01, words23);  // blocks 0, 1 | 4, 5
  const __m256i back = _mm256_unpackhi_epi32(words01, words23);   // blocks 2, 3 | 6, 7
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes), _mm256_permute2x128_si256(front, back, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + 32), _mm256_permute2x128_si256(front, back, 0x31));
}
#else
inline void draw_64(uint8_t* bytes, uint32_t group, uint32_t row, uint32_t place, uint32_t part, uint64_t seed,
                    uint32_t threshold) {
  for (uint32_t block = 0; block < 8; ++block) {
    const Block words = philox4x32<kDropoutRounds>({{group + block, row, place, part}}, seed);
    for (int lane = 0; lane < 8; ++lane) bytes[8 * block + lane] = dropout_half(words, lane) >= threshold ? 255 : 0;
  }
}
#endif

template <class To>
void write_weights(To* out, const uint8_t* bytes, int64_t width, To one) {
  for (int64_t key = 0; key < width; ++key) out[key] = bytes[key] ? one : To(0);
}

Tensor keep_weights_native_fwd(Tensor rows, int64_t heads, int64_t columns, double p, Tensor seed, int64_t place,
                               ScalarType type) {
  const char* op = "keep_weights";
  require(rows.dim() == 1 && rows.is_contiguous() && rows.scalar_type() == ScalarType::Long, op,
          ": rows must be a contiguous int64 vector");
  require(heads > 0 && columns > 0, op, ": heads and columns must be positive");
  require(type == ScalarType::Bool || type == ScalarType::Float || type == ScalarType::BFloat16 ||
              type == ScalarType::Half,
          op, ": dtype must be bool, fp32, bf16 or fp16");
  const Dropout dropout(p, seed, place, op);
  const int64_t count = rows.size(0);
  const auto* numbers = static_cast<const int64_t*>(rows.data_ptr());
  Tensor out = empty(seed, {heads, count, columns}, type);
  char* data = static_cast<char*>(out.data_ptr());
  const int64_t stride = columns * static_cast<int64_t>(out.element_size());
  torch::stable::parallel_for(0, heads * count, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> bytes(Dropout::buffer_size(columns), 255);
    for (int64_t i = begin; i < end; ++i) {
      if (dropout.on()) dropout.draw_weights(bytes.data(), numbers[i % count], columns, i / count);
      char* to = data + row_offset(i, stride);
      if (type == ScalarType::Bool) {
        write_weights(reinterpret_cast<bool*>(to), bytes.data(), columns, true);
      } else if (type == ScalarType::Float) {
        write_weights(reinterpret_cast<float*>(to), bytes.data(), columns, 1.0f);
      } else {  // 1.0 in bf16 or in fp16
        const uint16_t one = type == ScalarType::BFloat16 ? 0x3F80 : 0x3C00;
        write_weights(reinterpret_cast<uint16_t*>(to), bytes.data(), columns, one);
      }
    }
  });
  return out;
}

#ifdef __x86_64__
#define MAELM_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

struct WideWords {
  __m512i low, high;
};

MAELM_AVX512 MAELM_INLINE WideWords multiply_16(__m512i a, uint32_t multiplier) {
  const __m512i m = _mm512_set1_epi32(static_cast<int>(multiplier));
  const __m512i even = _mm512_mul_epu32(a, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
  return {_mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CCAA),
          _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB)};
}

MAELM_AVX512 MAELM_INLINE int kept_halves(__m512i halves, __m512i limit) {
  return static_cast<int>(_mm512_cmpge_epu16_mask(halves, limit));
}

// Sixteen blocks, word by word.
struct Blocks {
  __m512i word[4];
};

MAELM_AVX512 MAELM_INLINE Blocks philox_16(uint32_t group, uint32_t row, uint32_t place, uint32_t part,
                                           const DropoutKeys& keys) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(group)), lanes);
  __m512i c1 = _mm512_set1_epi32(static_cast<int>(row)), c2 = _mm512_set1_epi32(static_cast<int>(place));
  __m512i c3 = _mm512_set1_epi32(static_cast<int>(part));
  constexpr int kXor = 0x96;  // of three
  for (int round = 0; round < kDropoutRounds; ++round) {
    const WideWords first = multiply_16(c0, kPhiloxMultiplier0), second = multiply_16(c2, kPhiloxMultiplier1);
    c0 = _mm512_ternarylogic_epi32(second.high, c1, _mm512_set1_epi32(keys[round][0]), kXor);
    c1 = second.low;
    c2 = _mm512_ternarylogic_epi32(first.high, c3, _mm512_set1_epi32(keys[round][1]), kXor);
    c3 = first.low;
  }
  return {{c0, c1, c2, c3}};
}

// A bit for each of 128 keys that is kept. Of 32 columns, a 128-bit lane, word k decides about the keys 8 k to 8 k + 7 in
// their order; so each word's bits are whole bytes, and it is those that are put in order.
MAELM_AVX512 void draw_128(uint8_t* bits, uint32_t group, uint32_t row, uint32_t place, uint32_t part,
                           const DropoutKeys& keys, uint32_t threshold) {
  const Blocks c = philox_16(group, row, place, part, keys);
  const __m512i limit = _mm512_set1_epi16(static_cast<int16_t>(threshold));
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i bytes = _mm_setr_epi32(kept_halves(c.word[0], limit), kept_halves(c.word[1], limit),
                                       kept_halves(c.word[2], limit), kept_halves(c.word[3], limit));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bits), _mm_shuffle_epi8(bytes, order));
}

// draw_64 for 128 columns.
MAELM_AVX512 void draw_wide(uint8_t* bytes, uint32_t group, uint32_t row, uint32_t place, uint32_t part,
                            const DropoutKeys& keys, uint32_t threshold) {
  const Blocks c = philox_16(group, row, place, part, keys);
  const __m512i limit = _mm512_set1_epi16(static_cast<int16_t>(threshold));
  __m512i kept[4];
  for (int word = 0; word < 4; ++word) kept[word] = _mm512_movm_epi16(_mm512_cmpge_epu16_mask(c.word[word], limit));
  const __m512i words02 = _mm512_packs_epi16(kept[0], kept[2]), words13 = _mm512_packs_epi16(kept[1], kept[3]);
  const __m512i words01 = _mm512_unpacklo_epi16(words02, words13), words23 = _mm512_unpackhi_epi16(words02, words13);
  const __m512i front = _mm512_unpacklo_epi32(words01, words23);  // blocks 0, 1 | 4, 5 | 8, 9 | 12, 13
  const __m512i back = _mm512_unpackhi_epi32(words01, words23);   // blocks 2, 3 | 6, 7 | 10, 11 | 14, 15
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), four = _mm512_set1_epi64(4);
  _mm512_storeu_si512(bytes, _mm512_permutex2var_epi64(front, low, back));
  _mm512_storeu_si512(bytes + 64, _mm512_permutex2var_epi64(front, _mm512_add_epi64(low, four), back));
}
#endif

}  // namespace

Dropout::Dropout(double p, const std::optional<Tensor>& seed, int64_t place, const char* op)
    : on_(p != 0.0) {
  if (!on_) return;
  require(p > 0.0 && p < 1.0, op, ": dropout_p must lie in [0, 1), not ", p);
  require(seed.has_value(), op, ": dropout needs a seed");
  require(seed->numel() == 1 && seed->scalar_type() == ScalarType::Long, op, ": seed must be one int64");
  scale_ = static_cast<float>(1.0 / (1.0 - p));
  threshold_ = dropout_threshold(p);
  place_ = static_cast<uint32_t>(place);
  seed_ = static_cast<uint64_t>(*static_cast<const int64_t*>(seed->data_ptr()));
  uint32_t k0 = static_cast<uint32_t>(seed_), k1 = static_cast<uint32_t>(seed_ >> 32);
  for (auto& keys : keys_) {
    keys = {static_cast<int32_t>(k0), static_cast<int32_t>(k1)};
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
}

void Dropout::draw(uint8_t* bytes, int64_t row, int64_t width, int64_t part, int64_t first) const {
  if (threshold_ > 0xFFFF) {  // no half is that large
    std::memset(bytes, 0, buffer_size(width));
    return;
  }
  int64_t column = 0;
#ifdef __x86_64__
  if (has_avx512()) {
    for (; column + 64 < width; column += 128) {
      draw_wide(bytes + column, static_cast<uint32_t>((first + column) / kDropoutLanes), static_cast<uint32_t>(row),
                place_, static_cast<uint32_t>(part), keys_, threshold_);
    }
  }
#endif
  for (; column < width; column += 64) {
    draw_64(bytes + column, static_cast<uint32_t>((first + column) / kDropoutLanes), static_cast<uint32_t>(row), place_,
            static_cast<uint32_t>(part), seed_, threshold_);
  }
}

// Of 32 columns, pair t of word k (a block is t) belongs to keys 8 k + 2 t and the next one.
void Dropout::draw_weights(uint8_t* bytes, int64_t row, int64_t keys, int64_t head, int64_t first) const {
  draw(bytes, row, keys, head, first);
  for (int64_t span = 0; span < keys; span += 32) {
    uint16_t pairs[16], ordered[16];
    std::memcpy(pairs, bytes + span, 32);
    for (int k = 0; k < 4; ++k) {
      for (int t = 0; t < 4; ++t) ordered[4 * k + t] = pairs[4 * t + k];
    }
    std::memcpy(bytes + span, ordered, 32);
  }
}

#ifdef __x86_64__
void Dropout::draw_bits(uint8_t* bits, int64_t row, int64_t keys, int64_t head, int64_t first) const {
  if (threshold_ > 0xFFFF) {  // no half is that large
    std::memset(bits, 0, bits_size(keys));
    return;
  }
  for (int64_t key = 0; key < keys; key += 128) {
    draw_128(bits + key / 8, static_cast<uint32_t>((first + key) / kDropoutLanes), static_cast<uint32_t>(row), place_,
             static_cast<uint32_t>(head), keys_, threshold_);
  }
}
#endif

}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CPU, library) {
  library.impl("keep_weights_native_fwd", TORCH_BOX(&maelm::keep_weights_native_fwd));
}
