// Attention with bf16 products: attention.cpp's walk over the scores, with what is computed in them in
// attention_bf16_block.h. The scores of a few queries, one tile of rows, stay in the L1 cache until they are weights. The
// backward pass keeps the weights and gradients of a block of queries as words of two queries each, whose products with
// the queries are the keys' and values' gradients, summed in fp32.
//
// bf16 tensors are read and written where they lie; nothing is widened beforehand. Sums have one order, as there.

#include "attention_bf16.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#ifdef __x86_64__
#include "attention_bf16_block.h"
#endif

namespace maelm {

#ifdef __x86_64__
namespace {

constexpr int64_t kMostRows = 192;  // of a block of the backward pass
constexpr int64_t kMostWords = 48 << 10;  // of its weights, and of its gradients: together 384 KiB of the L2 cache

// At least `width` columns, of which a line has `of_line`, and an odd number of lines: rows below one another then lie in
// different sets of the caches.
inline int64_t spread(int64_t width, int64_t of_line) { return (ceil_div(width, of_line) | 1) * of_line; }

// Rows of a block of `width` keys in words of two rows each: whole tiles, in blocks that are nearly alike.
inline int64_t block_rows(int64_t rows, int64_t width) {
  const int64_t fit = 2 * kMostWords / width / kTileRows * kTileRows;
  const int64_t most = std::clamp<int64_t>(fit, kTileRows, kMostRows);
  return ceil_div(ceil_div(rows, ceil_div(rows, most)), kTileRows) * kTileRows;
}

// What both passes of a thread go by: where the biases of a sequence's keys lie, what dropout keeps, and the scores of a
// tile of queries.
class Tiles {
 public:
  Tiles(const Call& call)
      : call_(call), bits_(call.dropout.on() ? 2 * Dropout::bits_size(padded(call.longest_k) + kPanel) : 0) {}

  void set(int64_t s) {
    const int32_t* positions = call_.k_positions + call_.k_starts[s];
    const int64_t keys = call_.keys(s);
    if (call_.biased) {
      spans_.clear();
      for (int64_t first = 0; first < keys; first += 16) {
        spans_.push_back(describe_span(positions + first, std::min<int64_t>(16, keys - first)));
      }
    }
    if (call_.distances.limited()) extents_.set(positions, keys);
  }

  const Extents& extents() const { return extents_; }
  const Span* spans(const Keys& seen) const { return call_.biased ? spans_.data() + seen.first / 16 : nullptr; }

  // What dropout keeps of a query, a bit for each key it sees; null without. which: of two buffers.
  const uint8_t* bits(int64_t query, int64_t h, const Keys& seen, int which = 0) {
    if (!call_.dropout.on()) return nullptr;
    uint8_t* bits = bits_.data() + which * (bits_.size() / 2);
    const int64_t before = seen.first % 32;  // it draws 32 at a time
    call_.dropout.draw_bits(bits, query, before + seen.count, h, seen.first - before);
    return bits + before / 8;
  }

 private:
  const Call& call_;
  std::vector<uint8_t> bits_;
  std::vector<Span> spans_;
  Extents extents_;
};

class Backward {
 public:
  Backward(const Call& call, const BackwardTensors& tensors)
      : call_(call),
        tensors_(tensors),
        lse_(static_cast<const float*>(tensors.lse.data_ptr())),
        widest_(padded(call.longest_k)),
        spread_(spread(widest_, 16)),
        most_(std::max(kMostWords, kTileRows * spread_) + kMostRows / 2 * 2 * 16),
        scratch_(2 * kTileRows * spread_ + kTileRows * (spread(widest_, 32) / 2 + call.dim) + 2 * most_ +
                 (3 * widest_ / 2 + 2 * widest_ + kMostRows) * call.dim + 4 * call.distances.stride()),
        tiles_(call) {
    products_ = scratch_.take(kTileRows * spread_);
    slopes_ = scratch_.take(kTileRows * spread_);
    gradient_ = reinterpret_cast<uint16_t*>(scratch_.take(kTileRows * spread(widest_, 32) / 2));
    to_queries_ = scratch_.take(kTileRows * call.dim);
    weight_words_ = scratch_.take_words(most_);
    gradient_words_ = scratch_.take_words(most_);
    keys_t_ = scratch_.take_words(widest_ / 2 * call.dim);
    values_t_ = scratch_.take_words(widest_ / 2 * call.dim);
    keys_ = scratch_.take_words(widest_ / 2 * call.dim);
    key_sums_ = scratch_.take(widest_ * call.dim);
    value_sums_ = scratch_.take(widest_ * call.dim);
    queries_ = scratch_.take_words(kMostRows / 2 * call.dim);
    upstream_ = scratch_.take_words(kMostRows / 2 * call.dim);
    by_distance_ = scratch_.take(4 * call.distances.stride());
  }

  // line: (2R+1,) what is added to the gradient of the head's line; null if it is not wanted.
  void run(int64_t s, int64_t h, double* line) {
    const int64_t queries = call_.queries(s), keys = call_.keys(s), dim = call_.dim;
    const auto q = call_.queries_of<uint16_t>(call_.q, s, h);
    const auto up = call_.queries_of<uint16_t>(tensors_.grad_out, s, h);
    const auto to_k = call_.keys_of<uint16_t>(tensors_.k, s, h), to_v = call_.keys_of<uint16_t>(tensors_.v, s, h);
    if (keys == 0 || queries == 0) {
      const auto to_q = call_.queries_of<uint16_t>(tensors_.q, s, h);
      for (int64_t i = 0; i < queries; ++i) std::fill_n(to_q.row(i), dim, uint16_t{0});
      for (int64_t j = 0; j < keys; ++j) std::fill_n(to_k.row(j), dim, uint16_t{0});
      for (int64_t j = 0; j < keys; ++j) std::fill_n(to_v.row(j), dim, uint16_t{0});
      return;
    }
    const auto k = call_.keys_of<uint16_t>(call_.k, s, h), v = call_.keys_of<uint16_t>(call_.v, s, h);
    fetch_rows(k, 0, kFetched, dim);
    fetch_rows(v, 0, kFetched, dim);
    fetch_rows(q, 0, kTileRows, dim);
    fetch_rows(up, 0, kTileRows, dim);
    pack_words(keys_t_, k, keys, dim);
    pack_words(values_t_, v, keys, dim);
    pack_pairs(keys_, k, keys, dim);
    tiles_.set(s);
    const int64_t stride = call_.distances.stride();
    if (line != nullptr) std::fill_n(by_distance_, 4 * stride, 0.0f);
    const bool adds = call_.distances.limited();  // not all keys are in every block
    if (adds) {
      std::fill_n(key_sums_, keys * dim, 0.0f);
      std::fill_n(value_sums_, keys * dim, 0.0f);
    }
    for (int64_t start = 0, rows; start < queries; start += rows) {
      const auto [block_size, seen] = call_.block(s, start, block_rows(queries, padded(keys)), tiles_.extents());
      rows = block_size;
      const int64_t words = spread(seen.width(), 16);
      for (int64_t row = 0, height; row < rows; row += height) {
        height = std::min<int64_t>(kTileRows, rows - row);
        tile(seen, s, h, start + row, height, line != nullptr, words, row / 2 * words);
      }
      const HeadOf<uint16_t> q_block = {q.row(start), q.stride}, up_block = {up.row(start), up.stride};
      pack_pairs(queries_, q_block, rows, dim);
      pack_pairs(upstream_, up_block, rows, dim);
      const auto product = start == 0 && !adds ? bf16_product<true, false> : bf16_product<true, true>;
      const int64_t pairs = ceil_div(rows, 2);
      product(seen.count, dim, pairs, reinterpret_cast<uint16_t*>(gradient_words_), words, queries_, pairs * kPanel,
              key_sums_ + seen.first * dim, dim);
      product(seen.count, dim, pairs, reinterpret_cast<uint16_t*>(weight_words_), words, upstream_, pairs * kPanel,
              value_sums_ + seen.first * dim, dim);
    }
    for (int64_t j = 0; j < keys; ++j) {
      write_bf16(to_k.row(j), key_sums_ + j * dim, dim, call_.scale);
      write_bf16(to_v.row(j), value_sums_ + j * dim, dim, call_.dropout.scale());
    }
    if (line == nullptr) return;
    for (int64_t i = 0; i < stride; ++i) {
      by_distance_[i] += by_distance_[stride + i] + by_distance_[2 * stride + i] + by_distance_[3 * stride + i];
    }
    call_.distances.fold(by_distance_, line);
  }

 private:
  // `height` queries from `first` on: their weights and their scores' gradients to the words from `at` on, and their own
  // gradients.
  void tile(const Keys& seen, int64_t s, int64_t h, int64_t first, int64_t height, bool lines, int64_t words,
            int64_t at) {
    const int64_t width = seen.width(), dim = call_.dim, halves = spread(width, 32);
    const auto q = call_.queries_of<uint16_t>(call_.q, s, h);
    const auto up = call_.queries_of<uint16_t>(tensors_.grad_out, s, h);
    const auto to_q = call_.queries_of<uint16_t>(tensors_.q, s, h);
    const int64_t panels = seen.first * (dim / 2), panel = dim / 2 * kPanel;
    fetch_rows(q, first + height, kTileRows, dim);
    fetch_rows(up, first + height, kTileRows, dim);
    fetch_rows<1>(to_q, first, height, dim);
    bf16_product<false, false>(height, width, dim / 2, q.row(first), q.stride, keys_t_ + panels, panel, products_,
                               words);
    bf16_product<false, false>(height, width, dim / 2, up.row(first), up.stride, values_t_ + panels, panel, slopes_,
                               words);
    for (int64_t r = 0; r < height; r += 2, at += words) {
      const QueryRow one = query(seen, s, h, first + r, r, true, words, halves, 0);
      const QueryRow other = query(seen, s, h, first + r + 1, r + 1, r + 1 < height, words, halves, 1);
      bf16_gradients(one, other, seen.count, call_.scale, call_.dropout.scale(), tiles_.spans(seen), lines,
                     weight_words_ + at, gradient_words_ + at);
    }
    const int64_t pairs = ceil_div(call_.keys(s), 2);
    bf16_product<false, false>(height, dim, ceil_div(seen.count, 2), gradient_, halves, keys_ + seen.first / 2 * kPanel,
                               pairs * kPanel, to_queries_, dim);
    for (int64_t r = 0; r < height; ++r) write_bf16(to_q.row(first + r), to_queries_ + r * dim, dim, call_.scale);
  }

  // Row r of the tile; without a query of its own, or where the bias excludes all its keys, of weights that are 0.
  QueryRow query(const Keys& seen, int64_t s, int64_t h, int64_t i, int64_t r, bool exists, int64_t words,
                 int64_t halves, int which) {
    QueryRow row = {products_ + r * words, slopes_ + r * words, kInfinity, nullptr, nullptr, {}, gradient_ + r * halves};
    const int64_t query = call_.q_starts[s] + i - !exists;  // the one before it lends its place
    if (exists) row.lse = lse_[h * call_.q.size(0) + query];
    if (call_.biased) row.bias = call_.bias_row(h, query);
    float* sums = by_distance_ - call_.distances.least() - call_.q_positions[query];
    for (int turn = 0; turn < 2; ++turn) row.lines[turn] = sums + (2 * which + turn) * call_.distances.stride();
    if (!exists || row.lse == -kInfinity) {
      std::fill_n(row.products, seen.width(), 0.0f);
      std::fill_n(row.slopes, seen.width(), 0.0f);
      row.lse = kInfinity;
      return row;
    }
    row.bits = tiles_.bits(query, h, seen, which);
    return row;
  }

  const Call& call_;
  const BackwardTensors& tensors_;
  const float* lse_;
  int64_t widest_, spread_, most_;  // most_: words of a block
  Scratch scratch_;
  Tiles tiles_;
  float *products_, *slopes_, *to_queries_, *key_sums_, *value_sums_, *by_distance_;
  uint16_t* gradient_;
  uint32_t *weight_words_, *gradient_words_, *keys_t_, *values_t_, *keys_, *queries_, *upstream_;
};

}  // namespace

void bf16_forward(const Call& call, const Tensor& out, const Tensor& lse) {
  const int64_t dim = call.dim, total_queries = call.q.size(0);
  auto* statistics = static_cast<float*>(lse.data_ptr());
  torch::stable::parallel_for(0, call.sequences * call.heads, 1, [&](int64_t begin, int64_t end) {
    const int64_t widest = padded(call.longest_k), words_of_row = spread(widest, 16);
    Scratch scratch(kTileRows * (words_of_row + spread(widest, 32) / 2 + dim) + widest * dim);
    float *products = scratch.take(kTileRows * words_of_row), *sums = scratch.take(kTileRows * dim);
    auto* weights = reinterpret_cast<uint16_t*>(scratch.take(kTileRows * spread(widest, 32) / 2));
    uint32_t *keys_t = scratch.take_words(widest / 2 * dim), *values = scratch.take_words(widest / 2 * dim);
    Tiles tiles(call);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / call.heads, h = item % call.heads;
      const int64_t queries = call.queries(s), keys = call.keys(s), first = call.q_starts[s];
      float* lse_of = statistics + h * total_queries + first;
      const auto q_h = call.queries_of<uint16_t>(call.q, s, h), out_h = call.queries_of<uint16_t>(out, s, h);
      if (keys == 0) {
        for (int64_t i = 0; i < queries; ++i) std::fill_n(out_h.row(i), dim, uint16_t{0});
        std::fill_n(lse_of, queries, -kInfinity);
        continue;
      }
      const auto k_h = call.keys_of<uint16_t>(call.k, s, h), v_h = call.keys_of<uint16_t>(call.v, s, h);
      fetch_rows(k_h, 0, kFetched, dim);
      fetch_rows(v_h, 0, kFetched, dim);
      fetch_rows(q_h, 0, kTileRows, dim);
      pack_words(keys_t, k_h, keys, dim);
      pack_pairs(values, v_h, keys, dim);
      tiles.set(s);
      for (int64_t start = 0, rows; start < queries; start += rows) {
        rows = std::min<int64_t>(kTileRows, queries - start);
        fetch_rows(q_h, start + rows, kTileRows, dim);
        fetch_rows<1>(out_h, start, rows, dim);
        const Keys seen = call.seen(s, start, rows, tiles.extents());
        const int64_t width = seen.width(), words = spread(width, 16), halves = spread(width, 32);
        bf16_product<false, false>(rows, width, dim / 2, q_h.row(start), q_h.stride, keys_t + seen.first * (dim / 2),
                                   dim / 2 * kPanel, products, words);
        float factors[kTileRows];
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t query = first + start + r;
          const float* bias = call.biased ? call.bias_row(h, query) : nullptr;
          const Softmax softmax = bf16_weights(products + r * words, seen.count, call.scale, tiles.spans(seen), bias,
                                               tiles.bits(query, h, seen), weights + r * halves);
          const bool excluded = call.biased && softmax.top == -kInfinity;  // the bias excludes every key
          lse_of[start + r] = excluded ? -kInfinity : softmax.top + std::log(softmax.sum);
          factors[r] = excluded ? 0.0f : call.dropout.scale() / softmax.sum;
          if (excluded) std::fill_n(weights + r * halves, width, uint16_t{0});
        }
        bf16_product<false, false>(rows, dim, ceil_div(seen.count, 2), weights, halves, values + seen.first / 2 * kPanel,
                                   ceil_div(keys, 2) * kPanel, sums, dim);
        for (int64_t r = 0; r < rows; ++r) write_bf16(out_h.row(start + r), sums + r * dim, dim, factors[r]);
      }
    }
  });
}

std::vector<double> bf16_backward(const Call& call, const BackwardTensors& tensors, int64_t line_width) {
  return each_backward<Backward>(call, tensors, line_width);
}
#else
void bf16_forward(const Call&, const Tensor&, const Tensor&) {}
std::vector<double> bf16_backward(const Call&, const BackwardTensors&, int64_t) { return {}; }
#endif

}  // namespace maelm
