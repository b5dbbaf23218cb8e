// Masking in one pass over each sequence.
//
// The words of a sequence are drawn a block at a time in a loop that compiles to SIMD; clones of it for AVX2 were
// measured to be no faster than the SSE2 that every x86-64 has. The `count` smallest words are found by a histogram of
// their top eight bits: only the words in the bin where the count falls are compared, two or three of 512. Which of the
// masked tokens the encoder reads as [MASK] is the same question with a smaller count.

#include "masking.h"

#include <algorithm>
#include <cmath>

#include "words.h"

namespace maelm {
namespace {

constexpr double kWords = 4294967296.0;  // 2^32: scaling by it is exact, so thresholds agree with NumPy's
constexpr double kBertMask = 0.8, kBertRandom = 0.9;
constexpr int kTopShift = 24, kBins = 256;

// Words of positions 0 .. 4 * blocks - 1.
void draw_words(uint32_t sample, uint32_t epoch, Stream stream, uint64_t seed, uint32_t blocks,
                uint32_t* __restrict words) {
  for (uint32_t block = 0; block < blocks; ++block) {
    const Block drawn = draw_block(block, sample, epoch, stream, seed);
    for (int i = 0; i < 4; ++i) words[4 * static_cast<int64_t>(block) + i] = drawn.word[i];
  }
}

uint32_t draw_word(uint32_t sample, uint32_t epoch, Stream stream, uint64_t seed, int64_t position) {
  const auto block = static_cast<uint32_t>(position / 4);
  return draw_block(block, sample, epoch, stream, seed).word[position % 4];
}

// floor(share * total + addend); never more than total, whatever the rounding of a share next to 1.
int64_t share_of(int64_t total, double addend, double share) {
  // volatile: a product fused into the sum would be rounded once where NumPy rounds twice.
  volatile double product = share * static_cast<double>(total);
  return std::min(static_cast<int64_t>(std::floor(product + addend)), total);
}

// Reused from sequence to sequence.
struct Scratch {
  std::vector<uint32_t> words;
  std::vector<uint8_t> maskable;
  std::vector<uint64_t> edge;  // word and position of the candidates in the histogram's last bin
};

// maskable[p] = 1 where ids[p] is not special, else 0; returns how many are 1.
template <typename Token>
int64_t find_maskable(const Token* ids, int64_t length, const std::vector<int64_t>& special,
                      uint8_t* __restrict maskable) {
  std::fill_n(maskable, length, uint8_t{1});
  for (const int64_t id : special) {
    const auto token = static_cast<Token>(id);
    if (static_cast<int64_t>(token) != id) continue;  // not a value that Token can hold
    for (int64_t p = 0; p < length; ++p) maskable[p] &= static_cast<uint8_t>(ids[p] != token);
  }
  return std::count(maskable, maskable + length, uint8_t{1});
}

// fates[p] = fate where words[p] is one of the `count` smallest among the maskable positions, ties to the lower p.
void mark_smallest(Scratch& scratch, int64_t length, int64_t count, Fate fate, uint8_t* __restrict fates) {
  if (count == 0) return;
  const uint32_t* words = scratch.words.data();
  const uint8_t* maskable = scratch.maskable.data();
  // The upper half of the bins takes the positions that cannot be masked: no branch.
  const auto bin = [&](int64_t p) { return (words[p] >> kTopShift) | (maskable[p] ? 0u : uint32_t{kBins}); };
  uint32_t histogram[2 * kBins] = {};
  for (int64_t p = 0; p < length; ++p) ++histogram[bin(p)];
  uint32_t last = 0;
  int64_t before = 0;
  while (before + histogram[last] < count) before += histogram[last++];

  std::vector<uint64_t>& edge = scratch.edge;
  edge.clear();
  for (int64_t p = 0; p < length; ++p) {
    const uint32_t here = bin(p);
    fates[p] = here < last ? static_cast<uint8_t>(fate) : fates[p];
    if (here == last) edge.push_back(static_cast<uint64_t>(words[p]) << 32 | static_cast<uint64_t>(p));
  }
  const auto middle = edge.begin() + (count - before);
  std::nth_element(edge.begin(), middle - 1, edge.end());
  for (auto chosen = edge.begin(); chosen != middle; ++chosen) fates[*chosen & 0xFFFFFFFF] = fate;
}

// A token that is not special.
int32_t ordinary_token(uint32_t word, const MaskingOptions& options) {
  const auto ordinary = static_cast<uint64_t>(options.vocab_size) - options.special.size();
  auto token = static_cast<int64_t>(word * ordinary >> 32);
  for (const int64_t id : options.special) token += token >= id;
  return static_cast<int32_t>(token);
}

// Turns some of a sequence's masked tokens into kUnchanged and kRandom. words: scratch for `length` words.
void apply_bert_policy(uint32_t sample, uint32_t epoch, int64_t length, const MaskingOptions& options, uint32_t* words,
                       uint8_t* fates, std::vector<int32_t>& replacements) {
  draw_words(sample, epoch, Stream::kPolicy, options.seed, static_cast<uint32_t>((length + 3) / 4), words);
  for (int64_t p = 0; p < length; ++p) {
    if (fates[p] == kVisible || words[p] < kBertMask * kWords) continue;
    fates[p] = words[p] < kBertRandom * kWords ? kRandom : kUnchanged;
    if (fates[p] == kRandom) {
      replacements.push_back(ordinary_token(draw_word(sample, epoch, Stream::kReplacement, options.seed, p), options));
    }
  }
}

// Turns all of a sequence's masked tokens into kRandom. words: scratch for `length` words.
void apply_random_policy(uint32_t sample, uint32_t epoch, int64_t length, const MaskingOptions& options,
                         uint32_t* words, uint8_t* fates, std::vector<int32_t>& replacements) {
  draw_words(sample, epoch, Stream::kReplacement, options.seed, static_cast<uint32_t>((length + 3) / 4), words);
  for (int64_t p = 0; p < length; ++p) {
    if (fates[p] == kVisible) continue;
    fates[p] = kRandom;
    replacements.push_back(ordinary_token(words[p], options));
  }
}

}  // namespace

template <typename Token>
Choice choose(const Sequences<Token>& sequences, const MaskingOptions& options) {
  Choice choice;
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences.count; ++s) {
    choice.tokens += sequences.lengths[s];
    longest = std::max(longest, sequences.lengths[s]);
  }
  choice.fates.resize(choice.tokens);
  choice.visible.resize(sequences.count);
  choice.masked.resize(sequences.count);
  Scratch scratch;
  scratch.words.resize((longest + 3) / 4 * 4);
  scratch.maskable.assign(longest, 1);

  const Token* ids = sequences.ids;
  uint8_t* fates = choice.fates.data();
  for (int64_t s = 0; s < sequences.count; ++s) {
    const int64_t length = sequences.lengths[s];
    const auto sample = static_cast<uint32_t>(sequences.samples[s]), epoch = static_cast<uint32_t>(sequences.epochs[s]);
    int64_t maskable = length;
    if (!options.special_tokens) {
      maskable = find_maskable(ids, length, options.special, scratch.maskable.data());
    }
    double addend = 0.5;
    if (options.stochastic) addend = draw_word(sample, epoch, Stream::kRounding, options.seed, 0) / kWords;
    const int64_t count = share_of(maskable, addend, options.rate);
    const int64_t shown = share_of(count, 0.5, options.shown);
    std::fill_n(fates, length, static_cast<uint8_t>(kVisible));
    if (count > 0) {
      draw_words(sample, epoch, Stream::kMask, options.seed, static_cast<uint32_t>((length + 3) / 4),
                 scratch.words.data());
    }
    if (shown < count) mark_smallest(scratch, length, count, kRemoved, fates);
    mark_smallest(scratch, length, shown, kMask, fates);
    int64_t removed = count - shown;
    if (options.policy != Policy::kMask && count > 0) {
      const auto apply = options.policy == Policy::kBert ? apply_bert_policy : apply_random_policy;
      apply(sample, epoch, length, options, scratch.words.data(), fates, choice.replacements);
      removed = std::count(fates, fates + length, uint8_t{kRemoved});
    }
    choice.visible[s] = static_cast<int32_t>(length - removed);
    choice.masked[s] = static_cast<int32_t>(count);
    choice.visible_tokens += length - removed;
    choice.masked_tokens += count;
    ids += length;
    fates += length;
  }
  return choice;
}

template <typename Token>
void compact(const Sequences<Token>& sequences, const MaskingOptions& options, const Choice& choice, PackedArrays out) {
  const auto mask_id = static_cast<int32_t>(options.mask_id);
  const Token* ids = sequences.ids;
  const uint8_t* fates = choice.fates.data();
  const int32_t* replacement = choice.replacements.data();
  int32_t n = 0, t = 0, m = 0;
  out.visible_cu_seqlens[0] = out.decoder_cu_seqlens[0] = out.masked_cu_seqlens[0] = 0;
  for (int64_t s = 0; s < sequences.count; ++s) {
    const auto length = static_cast<int32_t>(sequences.lengths[s]);
    for (int32_t p = 0; p < length; ++p) out.decoder_positions[n + p] = p;

    // Every token is written, and the place moves on only behind those that stay: no branch to mispredict. The loops
    // end at the last token that stays, so that nothing is written behind the arrays' ends.
    int32_t end = length;
    while (end > 0 && fates[end - 1] == kRemoved) out.source[n + --end] = -1;
    for (int32_t p = 0; p < end; ++p) {
      const bool here = fates[p] != kRemoved;
      out.ids[t] = fates[p] == kMask ? mask_id : static_cast<int32_t>(ids[p]);
      out.visible_positions[t] = p;
      out.source[n + p] = here ? t : -1;
      if (fates[p] == kRandom) out.ids[t] = *replacement++;
      t += here;
    }
    end = length;
    while (end > 0 && fates[end - 1] == kVisible) --end;
    for (int32_t p = 0; p < end; ++p) {
      out.masked_index[m] = n + p;
      out.masked_positions[m] = p;
      out.labels[m] = static_cast<int32_t>(ids[p]);
      m += fates[p] != kVisible;
    }
    n += length;
    ids += length;
    fates += length;
    out.visible_cu_seqlens[s + 1] = t;
    out.decoder_cu_seqlens[s + 1] = n;
    out.masked_cu_seqlens[s + 1] = m;
  }
}

#define MAELM_INSTANTIATE(Token)                                                   \
  template Choice choose<Token>(const Sequences<Token>&, const MaskingOptions&); \
  template void compact<Token>(const Sequences<Token>&, const MaskingOptions&, const Choice&, PackedArrays);
MAELM_INSTANTIATE(uint16_t)
MAELM_INSTANTIATE(uint32_t)
MAELM_INSTANTIATE(int32_t)
MAELM_INSTANTIATE(int64_t)
#undef MAELM_INSTANTIATE

}  // namespace maelm
