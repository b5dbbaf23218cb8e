// Runs the host code on random and on odd inputs and checks what must hold of every result. test_sanitizers.py compiles
// it with the address and undefined-behaviour sanitizers, which abort on any error; output arrays are exactly as large
// as they must be, each its own allocation, so that a write one place too far is seen.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "masking.h"
#include "memory.h"
#include "order.h"
#include "packing.h"
#include "samples.h"
#include "words.h"

#define REQUIRE(condition)                                                         \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

namespace {

std::mt19937_64 generator(0);

int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

// An allocation of exactly this many elements; a vector might have room behind its end.
template <typename Number = int32_t>
std::unique_ptr<Number[]> exactly(int64_t count) {
  return std::unique_ptr<Number[]>(new Number[count]);
}

// The published test vectors of Philox4x32-10.
void check_philox() {
  const maelm::Block zeros = maelm::philox4x32<10>({{0, 0, 0, 0}}, 0);
  REQUIRE(zeros.word[0] == 0x6627e8d5 && zeros.word[1] == 0xe169c58d);
  REQUIRE(zeros.word[2] == 0xbc57ac4c && zeros.word[3] == 0x9b00dbd8);
  constexpr uint32_t kOnes = 0xffffffff;
  const maelm::Block ones = maelm::philox4x32<10>({{kOnes, kOnes, kOnes, kOnes}}, ~uint64_t{0});
  REQUIRE(ones.word[0] == 0x408f276d && ones.word[1] == 0x41c83b0e);
  REQUIRE(ones.word[2] == 0xa20bc7c6 && ones.word[3] == 0x6d5451fd);
}

template <typename Token>
void check_masking(const std::vector<int64_t>& lengths, const maelm::MaskingOptions& options) {
  const auto count = static_cast<int64_t>(lengths.size());
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const auto ids = exactly<Token>(total);
  for (int64_t i = 0; i < total; ++i) ids[i] = static_cast<Token>(draw(0, options.vocab_size - 1));
  std::vector<int64_t> samples(count), epochs(count);
  for (int64_t s = 0; s < count; ++s) {
    samples[s] = draw(0, std::numeric_limits<uint32_t>::max());
    epochs[s] = draw(0, 1) ? std::numeric_limits<uint32_t>::max() : 0;
  }
  const maelm::Sequences<Token> sequences{ids.get(), lengths.data(), samples.data(), epochs.data(), count};
  const maelm::Choice choice = maelm::choose(sequences, options);
  REQUIRE(choice.tokens == total);
  const int64_t rows = choice.visible_tokens, masks = choice.masked_tokens;
  REQUIRE(masks >= 0 && masks <= total && rows <= total);
  if (options.shown == 1) REQUIRE(rows == total);

  auto visible_ids = exactly(rows), visible_positions = exactly(rows), source = exactly(total),
       decoder_positions = exactly(total), masked_index = exactly(masks), masked_positions = exactly(masks),
       labels = exactly(masks), cu_seqlens = exactly(count + 1), decoder_cu_seqlens = exactly(count + 1),
       masked_cu_seqlens = exactly(count + 1);
  maelm::compact(sequences, options, choice,
                 {visible_ids.get(), source.get(), masked_index.get(), labels.get(), cu_seqlens.get(),
                  visible_positions.get(), decoder_cu_seqlens.get(), decoder_positions.get(), masked_cu_seqlens.get(),
                  masked_positions.get()});
  REQUIRE(cu_seqlens[count] == rows && decoder_cu_seqlens[count] == total && masked_cu_seqlens[count] == masks);
  int32_t row = 0;
  int64_t mask = 0;
  for (int64_t s = 0, n = 0; s < count; ++s) {
    REQUIRE(decoder_cu_seqlens[s] == n && cu_seqlens[s] == row && masked_cu_seqlens[s] == mask);
    REQUIRE(choice.masked[s] >= 0 && choice.masked[s] <= lengths[s]);
    if (options.policy == maelm::Policy::kMask) {
      REQUIRE(lengths[s] - choice.visible[s] == choice.masked[s] - std::floor(options.shown * choice.masked[s] + 0.5));
    }
    for (int64_t p = 0; p < lengths[s]; ++p, ++n) {
      const bool masked = mask < masks && masked_index[mask] == n;
      const auto id = static_cast<int64_t>(ids[n]);
      const bool special = std::find(options.special.begin(), options.special.end(), id) != options.special.end();
      REQUIRE(decoder_positions[n] == p);
      if (masked) REQUIRE(labels[mask] == id && masked_positions[mask] == p && (options.special_tokens || !special));
      if (source[n] == -1) {
        REQUIRE(masked && options.shown < 1 && options.policy != maelm::Policy::kRandom);
      } else {
        REQUIRE(source[n] == row && visible_positions[row] == p);
        const int64_t read = visible_ids[row];
        REQUIRE(read == id || masked);
        REQUIRE(read >= 0 && read < options.vocab_size);
        if (masked && options.policy == maelm::Policy::kMask) REQUIRE(read == options.mask_id);
        if (masked && options.policy == maelm::Policy::kRandom) {
          REQUIRE(std::find(options.special.begin(), options.special.end(), read) == options.special.end());
        }
        ++row;
      }
      mask += masked;
    }
  }
  REQUIRE(row == rows && mask == masks);
}

void check_masking() {
  std::vector<std::vector<int64_t>> shapes = {{}, {0}, {1}, {0, 0, 5, 0}, {1, 1, 1}, {3, 512, 511, 513, 2}, {100'003}};
  for (int i = 0; i < 100; ++i) {
    shapes.emplace_back(draw(0, 6));
    for (int64_t& length : shapes.back()) length = draw(0, 70);
  }
  const double rates[] = {1e-18, 0.15, 0.5, 0.999, 1 - 1.0 / (int64_t{1} << 53)};
  const double shares[] = {0, 0.25, 0.5, 1 - 1.0 / (int64_t{1} << 53), 1};
  using maelm::Policy;
  for (const auto& lengths : shapes) {
    for (int flags = 0; flags < 24; ++flags) {
      const Policy policy = flags % 3 == 0 ? Policy::kMask : flags % 3 == 1 ? Policy::kBert : Policy::kRandom;
      const bool stochastic = flags / 3 & 1, special_tokens = flags / 3 & 2, all_shown = flags / 3 & 4;
      const double rate = rates[draw(0, 4)], share = policy == Policy::kMask ? shares[draw(0, 4)] : 0;
      const double shown = all_shown || policy == Policy::kRandom ? 1 : share;
      const maelm::MaskingOptions options{rate, stochastic, special_tokens, policy, shown, 60,
                                          59,   {0, 1, 2, 59}, generator()};
      check_masking<uint16_t>(lengths, options);
      check_masking<uint32_t>(lengths, options);
      check_masking<int32_t>(lengths, options);
      check_masking<int64_t>(lengths, options);
    }
  }
  // A special token that the token type cannot hold, and no special token at all.
  check_masking<uint16_t>({500}, {0.3, false, false, Policy::kBert, 0, 60'000, 9, {9, 59'999}, 1});
  check_masking<uint16_t>({500}, {0.3, false, false, Policy::kRandom, 1, 60, 9, {9, 65'536 + 9}, 1});
  check_masking<int64_t>({500}, {0.3, true, false, Policy::kBert, 0, 60, 9, {}, 1});
  // Nothing but special tokens, none of which may be masked.
  check_masking<uint16_t>({50}, {0.9, false, false, Policy::kMask, 0.5, 3, 2, {0, 1, 2}, 1});
}

void check_bins(const std::vector<int64_t>& lengths, const int32_t* bins, int64_t opened, int64_t budget) {
  std::vector<int64_t> used(opened);
  for (size_t i = 0; i < lengths.size(); ++i) {
    REQUIRE(bins[i] >= 0 && bins[i] < opened);
    used[bins[i]] += lengths[i];
  }
  for (const int64_t tokens : used) REQUIRE(tokens > 0 && tokens <= budget);
}

void check_packing() {
  for (int round = 0; round < 400; ++round) {
    const int64_t largest = std::numeric_limits<int32_t>::max();
    const int64_t budget = round % 4 ? draw(1, 100) : round % 8 ? draw(1, 1 << 20) : largest;
    std::vector<int64_t> lengths(draw(0, 300));
    for (int64_t& length : lengths) length = draw(1, budget);
    if (round % 5 == 0) std::fill(lengths.begin(), lengths.end(), budget);
    const auto count = static_cast<int64_t>(lengths.size());
    auto bins = exactly(count);
    const int64_t opened = maelm::best_fit(lengths.data(), count, budget, bins.get());
    check_bins(lengths, bins.get(), opened, budget);
    REQUIRE(maelm::spread(lengths.data(), count, budget, bins.get()) == opened);
    check_bins(lengths, bins.get(), opened, budget);
  }
  // Best fit fills 8 and 1, spread 5 and 4. Where that would make a bin overflow, spread does what best fit does.
  const int64_t loose[] = {5, 3, 1}, tight[] = {4, 4, 3, 3, 2, 2, 2};
  auto bins = exactly(7);
  REQUIRE(maelm::spread(loose, 3, 8, bins.get()) == 2 && bins[0] == 0 && bins[1] == 1 && bins[2] == 1);
  auto fitted = exactly(7);
  REQUIRE(maelm::best_fit(tight, 7, 10, fitted.get()) == 2 && maelm::spread(tight, 7, 10, bins.get()) == 2);
  REQUIRE(std::equal(bins.get(), bins.get() + 7, fitted.get()));
}

template <typename Token>
void check_samples() {
  // Record batches as a store has them, some without rows, some of empty samples.
  std::vector<std::unique_ptr<Token[]>> tokens;
  std::vector<std::unique_ptr<int32_t[]>> offsets;
  std::vector<std::vector<Token>> expected;
  maelm::Samples store(sizeof(Token));
  REQUIRE(store.count() == 0);
  for (int batch = 0; batch < 20; ++batch) {
    const int64_t rows = batch % 3 ? draw(1, 40) : 0;
    offsets.push_back(exactly(rows + 1));
    int32_t* ends = offsets.back().get();
    ends[0] = static_cast<int32_t>(draw(0, 3));  // a slice need not start at 0
    for (int64_t r = 0; r < rows; ++r) ends[r + 1] = ends[r] + static_cast<int32_t>(draw(0, 9));
    tokens.push_back(exactly<Token>(ends[rows]));
    Token* token = tokens.back().get();
    for (int32_t i = 0; i < ends[rows]; ++i) token[i] = static_cast<Token>(generator());
    for (int64_t r = 0; r < rows; ++r) expected.emplace_back(token + ends[r], token + ends[r + 1]);
    store.add(token, ends[rows], ends, rows);
  }
  const auto count = static_cast<int64_t>(expected.size());
  REQUIRE(store.count() == count);
  const auto asked = exactly<int64_t>(500), lengths = exactly<int64_t>(500);
  for (int64_t i = 0; i < 500; ++i) asked[i] = i == 0 ? 0 : i == 1 ? count - 1 : draw(0, count - 1);
  REQUIRE(store.lengths(asked.get(), 500, lengths.get()) == -1);
  const auto read = exactly<Token>(std::accumulate(lengths.get(), lengths.get() + 500, int64_t{0}));
  store.read(asked.get(), 500, read.get());
  const Token* from = read.get();
  for (int64_t i = 0; i < 500; ++i) {
    const std::vector<Token>& sample = expected[asked[i]];
    REQUIRE(lengths[i] == static_cast<int64_t>(sample.size()));
    REQUIRE(std::equal(sample.begin(), sample.end(), from));
    from += sample.size();
  }
  store.read(asked.get(), 0, nullptr);

  // Of damaged offsets the first sample asked for that has no place in the tokens is named.
  const std::vector<std::vector<int32_t>> damaged = {{0, 2, 1, 5}, {0, 2, 9, 5}, {0, 2, -3, 5}, {0, 2, 6, 6}};
  for (const std::vector<int32_t>& wrong : damaged) {
    const auto five = exactly<Token>(5);
    maelm::Samples torn(sizeof(Token));
    torn.add(five.get(), 5, wrong.data(), 3);
    const int64_t order[] = {0, 1, 2};
    REQUIRE(torn.lengths(order, 3, lengths.get()) == 1);
  }
}

void check_order() {
  for (const int64_t size : {1, 2, 255, 256, 257, 5000}) {
    std::vector<int64_t> index(size), ids(size);
    std::iota(index.begin(), index.end(), 0);
    const int half_bits = size > 256 ? 7 : 4;
    maelm::permute(index.data(), size, size, half_bits, 8, generator(), 3, ids.data());
    std::sort(ids.begin(), ids.end());
    REQUIRE(ids == index);
  }
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  const int64_t last = kLargest - 1;
  int64_t id = -1;
  maelm::permute(&last, 1, kLargest, 32, 8, generator(), 3, &id);
  REQUIRE(id >= 0 && id < kLargest);
}

}  // namespace

int main() {
  check_philox();
  check_masking();
  check_packing();
  check_samples<uint16_t>();
  check_samples<uint32_t>();
  check_order();
  maelm::keep_freed_memory();
  std::puts("ok");
}
