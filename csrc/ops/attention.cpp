// Attention over packed sequences on the CPU, fp32, forward and backward. A (sequence, head) is one piece of work: its
// keys and values are first copied into panels of 16 columns, which the matrix products then read from the L1 and L2
// caches; the scores of a block of queries never leave these caches. The backward pass computes them again.
//
// Everything that is summed is summed in an order that depends on the lengths alone, never on the number of threads.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "dropout.h"
#include "vec.h"

namespace maelm {
namespace {

constexpr const char* kOp = "attention";
constexpr int64_t kPanel = 16;        // columns of a panel: two Vec
constexpr int64_t kTile = 6;          // rows of a product's tile: 6 x 2 sums fill the registers, with what they read
constexpr int64_t kBlockBytes = 96 << 10;  // scores of a block of queries
constexpr int64_t kMostRows = 60;     // of a block
constexpr int64_t kPiecesOfLine = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t count) { return ceil_div(count, kPanel) * kPanel; }

// Rows of a block of scores that are `width` wide: whole tiles, no more than there are.
inline int64_t block_rows(int64_t rows, int64_t width) {
  const int64_t fit = kBlockBytes / static_cast<int64_t>(sizeof(float)) / std::max<int64_t>(width, 1);
  return std::min(std::clamp(fit / kTile * kTile, kTile, kMostRows), rows);
}

// exp of what is at most 88, within 2 units in the last place; 0 below the smallest normal number's logarithm. NaN
// stays NaN.
MAELM_INLINE Vec exponential(Vec x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2**23: adding it leaves an integer in the low bits
  const Vec least = Vec{} - 87.3f;
  const Vec bounded = least > x ? least : x;
  const Vec shifted = bounded * 1.44269504f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, ln 2 in two parts
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const WordVec power = (bits<WordVec>(shifted) - 0x4B400000u + 127u) << 23;  // 2**n
  const Vec y = p * bits<Vec>(power);
  return x < least ? Vec{} : y;
}

MAELM_INLINE float total(Vec v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

MAELM_INLINE float largest(Vec v) {
  const auto most = [&](int a, int b) { return v[b] > v[a] ? v[b] : v[a]; };
  return std::max(std::max(most(0, 4), most(1, 5)), std::max(most(2, 6), most(3, 7)));
}

// Rows of one head: row r starts at data + r * stride and its columns lie side by side.
struct Head {
  float* data;
  int64_t stride;
  float* row(int64_t r) const { return data + r * stride; }
};

// out[r][c] = sum over k < depth of a(r, k) * panel[k][c], or added to what is there, for 16 columns c. a(r, k) is
// a[r * lda + k], or a[k * lda + r] if kTransposed.
template <int kRows, bool kTransposed, bool kAdd>
MAELM_INLINE void tile(const float* a, int64_t lda, const float* panel, int64_t depth, float* out, int64_t ldc) {
  Vec sums[kRows][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const Vec left = load<Vec>(panel + k * kPanel), right = load<Vec>(panel + k * kPanel + 8);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const float x = kTransposed ? a[k * lda + r] : a[r * lda + k];
      sums[r][0] += x * left;
      sums[r][1] += x * right;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    float* to = out + r * ldc;
    store<Vec>(to, kAdd ? load<Vec>(to) + sums[r][0] : sums[r][0]);
    store<Vec>(to + 8, kAdd ? load<Vec>(to + 8) + sums[r][1] : sums[r][1]);
  }
}

template <bool kTransposed, bool kAdd>
void tile_of(int64_t rows, const float* a, int64_t lda, const float* panel, int64_t depth, float* out, int64_t ldc) {
  switch (rows) {
    case 6: return tile<6, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    case 5: return tile<5, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    case 4: return tile<4, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    case 3: return tile<3, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    case 2: return tile<2, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
    default: return tile<1, kTransposed, kAdd>(a, lda, panel, depth, out, ldc);
  }
}

// out (rows, columns) = a (rows, depth), or a (depth, rows) transposed, times b in panels `panel_step` floats apart.
template <bool kTransposed, bool kAdd>
void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda, const float* panels,
             int64_t panel_step, float* out, int64_t ldc) {
  for (int64_t column = 0; column < columns; column += kPanel, panels += panel_step) {
    for (int64_t row = 0; row < rows; row += kTile) {
      tile_of<kTransposed, kAdd>(std::min(kTile, rows - row), a + row * (kTransposed ? 1 : lda), lda, panels, depth,
                                 out + row * ldc + column, ldc);
    }
  }
}

// The columns of x (rows, dim) in panels (dim / 16, rows, 16), times `factor`.
void pack_columns(float* panels, const Head& x, int64_t rows, int64_t dim, float factor) {
  for (int64_t column = 0; column < dim; column += kPanel) {
    for (int64_t r = 0; r < rows; ++r, panels += kPanel) {
      store<Vec>(panels, load<Vec>(x.row(r) + column) * factor);
      store<Vec>(panels + 8, load<Vec>(x.row(r) + column + 8) * factor);
    }
  }
}

#ifdef __AVX2__
MAELM_INLINE void transpose_8(float* to, int64_t to_stride, const float* const* from, float factor) {
  Vec r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = load<Vec>(from[i]) * factor;
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    store<Vec>(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    store<Vec>(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#else
inline void transpose_8(float* to, int64_t to_stride, const float* const* from, float factor) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) to[i * to_stride + j] = from[j][i] * factor;
  }
}
#endif

// The rows of x (rows, dim) as columns in panels (ceil(rows / 16), dim, 16), times `factor`; zeros for absent rows.
void pack_rows(float* panels, const Head& x, int64_t rows, int64_t dim, float factor) {
  static const float kZeros[128] = {};
  for (int64_t row = 0; row < padded(rows); row += 8) {
    const float* from[8];
    for (int64_t i = 0; i < 8; ++i) from[i] = row + i < rows ? x.row(row + i) : kZeros;
    float* to = panels + row / kPanel * kPanel * dim + row % kPanel;
    for (int64_t column = 0; column < dim; column += 8) {
      transpose_8(to + column * kPanel, kPanel, from, factor);
      for (auto& pointer : from) pointer += 8;
    }
  }
}

// The bias of every distance between the positions of a batch, per head: line, with its ends drawn out.
class Distances {
 public:
  Distances(const std::optional<Tensor>& line, const Tensor& q_positions, const Tensor& k_positions)
      : reach_(line.has_value() ? line->size(1) / 2 : 0) {
    if (!line.has_value() || q_positions.size(0) == 0 || k_positions.size(0) == 0) return;
    const auto ends = [](const Tensor& positions) {
      const auto* p = static_cast<const int32_t*>(positions.data_ptr());
      const auto [low, high] = std::minmax_element(p, p + positions.size(0));
      return std::pair<int64_t, int64_t>(*low, *high);
    };
    const auto [q_low, q_high] = ends(q_positions);
    const auto [k_low, k_high] = ends(k_positions);
    require(q_low >= 0 && k_low >= 0 && std::max(q_high, k_high) < kMost, kOp,
            ": with a bias, positions must lie in [0, ", kMost, ")");
    least_ = k_low - q_high;
    width_ = k_high - q_low - least_ + 1;
    stride_ = padded(width_) + kPanel;  // a span may read 15 past the last distance
    const Tensor values = fp32(*line);
    const auto* from = static_cast<const float*>(values.data_ptr());
    data_.resize(static_cast<size_t>(line->size(0) * stride_));
    for (int64_t head = 0; head < line->size(0); ++head) {
      for (int64_t i = 0; i < stride_; ++i) data_[head * stride_ + i] = from[head * (2 * reach_ + 1) + place(i)];
    }
  }

  // Of a head: the bias of key position k and query position q is row[k - q - least()].
  const float* row(int64_t head) const { return data_.data() + head * stride_; }
  int64_t least() const { return least_; }
  int64_t stride() const { return stride_; }
  // Adds what belongs to every distance, (stride(),), to what belongs to the line's, (2R+1,).
  void fold(const float* by_distance, double* line) const {
    for (int64_t i = 0; i < width_; ++i) line[place(i)] += static_cast<double>(by_distance[i]);
  }

 private:
  static constexpr int64_t kMost = 1 << 22;
  int64_t place(int64_t i) const { return std::clamp(i + least_, -reach_, reach_) + reach_; }

  int64_t reach_, least_ = 0, width_ = 0, stride_ = 0;
  std::vector<float> data_;
};

// Where the biases of a sequence's keys lie, eight keys at a time. Removed tokens leave gaps between positions; as long
// as eight keys lie within 16 positions, their biases are two neighbouring Vec, permuted.
class Spans {
 public:
  void set(const int32_t* positions, int64_t keys) {
    positions_ = positions;
    keys_ = keys;
    spans_.resize(static_cast<size_t>(padded(keys) / 8));
    for (size_t i = 0; i < spans_.size(); ++i) describe(spans_[i], static_cast<int64_t>(i) * 8);
  }

  // scores[j] += row[position of key j]; row is that of the query.
  void add(float* scores, const float* row) const {
    for (const Span& span : spans_) {
      Vec bias;
      if (span.near) {
        bias = pick(row + span.base, span.at);
      } else {
        bias = Vec{};
        for (int64_t lane = 0; lane < span.count; ++lane) bias[lane] = row[span.at[lane]];
      }
      store<Vec>(scores, load<Vec>(scores) + bias);
      scores += 8;
    }
  }

  // row[position of key j] += gradient[j]: spans take turns with two rows `apart`, since one and the next overlap, and
  // reading what was just written would wait.
  void add_back(const float* gradient, float* row, int64_t apart) const {
    for (const Span& span : spans_) {
      if (span.near) {
        const Vec values = load<Vec>(gradient);
        float* to = row + span.base;
        store<Vec>(to, load<Vec>(to) + put(values, span.from[0]));
        store<Vec>(to + 8, load<Vec>(to + 8) + put(values, span.from[1]));
      } else {
        for (int64_t lane = 0; lane < span.count; ++lane) row[span.at[lane]] += gradient[lane];
      }
      gradient += 8;
      row += apart;
      apart = -apart;
    }
  }

 private:
  struct Span {
    IntVec at;       // near: what of the 16 from base on belongs to a key. Else: the key's position
    IntVec from[2];  // near: the lane of the key that each of the 16 belongs to, or -1
    int64_t base, count;
    bool near;
  };

  void describe(Span& span, int64_t first) const {
    span.count = std::clamp<int64_t>(keys_ - first, 0, 8);
    span.at = IntVec{};
    span.from[0] = span.from[1] = IntVec{} - 1;
    const int32_t* p = positions_ + first;
    span.base = span.count > 0 ? *std::min_element(p, p + span.count) : positions_[0];
    span.near = true;
    for (int64_t lane = 0; lane < span.count; ++lane) {
      const int64_t at = p[lane] - span.base;
      if (at >= 16 || span.from[at / 8][at % 8] != -1) {
        span.near = false;
        break;
      }
      span.at[lane] = static_cast<int32_t>(at);
      span.from[at / 8][at % 8] = static_cast<int32_t>(lane);
    }
    if (!span.near) {
      for (int64_t lane = 0; lane < span.count; ++lane) span.at[lane] = p[lane];
    }
  }

#ifdef __AVX2__
  static MAELM_INLINE Vec pick(const float* from, IntVec at) {
    const auto index = reinterpret_cast<__m256i>(at);
    const Vec low = _mm256_permutevar8x32_ps(load<Vec>(from), index);
    const Vec high = _mm256_permutevar8x32_ps(load<Vec>(from + 8), index);
    return at > 7 ? high : low;
  }
  static MAELM_INLINE Vec put(Vec values, IntVec from) {
    const Vec moved = _mm256_permutevar8x32_ps(values, reinterpret_cast<__m256i>(from));
    return from >= 0 ? moved : Vec{};
  }
#else
  static Vec pick(const float* from, IntVec at) {
    Vec out;
    for (int lane = 0; lane < 8; ++lane) out[lane] = from[at[lane]];
    return out;
  }
  static Vec put(Vec values, IntVec from) {
    Vec out;
    for (int lane = 0; lane < 8; ++lane) out[lane] = from[lane] >= 0 ? values[from[lane]] : 0.0f;
    return out;
  }
#endif

  const int32_t* positions_ = nullptr;
  int64_t keys_ = 0;
  std::vector<Span> spans_;
};

// One call's tensors, checked.
struct Call {
  int64_t longest_q = 0, longest_k = 0;
  Tensor q, k, v;
  const int32_t *q_starts, *k_starts, *q_positions, *k_positions;
  int64_t sequences, heads, dim;
  float scale;
  Distances distances;
  bool biased;
  Dropout dropout;

  Call(const Tensor& q_, const Tensor& k_, const Tensor& v_, const std::optional<Tensor>& line,
       const Tensor& q_starts_, const Tensor& k_starts_, const Tensor& q_positions_, const Tensor& k_positions_,
       double scale_, double dropout_p, const std::optional<Tensor>& seed, int64_t place)
      : q(rows(q_, "q")),
        k(rows(k_, "k")),
        v(rows(v_, "v")),
        q_starts(starts(q_starts_, "q_starts", q.size(0), longest_q)),
        k_starts(starts(k_starts_, "k_starts", k.size(0), longest_k)),
        q_positions(positions(q_positions_, "q_positions", q.size(0))),
        k_positions(positions(k_positions_, "k_positions", k.size(0))),
        sequences(q_starts_.size(0) - 1),
        heads(q.size(1)),
        dim(q.size(2)),
        scale(static_cast<float>(scale_)),
        distances(line, q_positions_, k_positions_),
        biased(line.has_value()),
        dropout(dropout_p, seed, place, kOp) {
    require(dim == 16 || dim == 32 || dim == 64 || dim == 128, kOp, ": head_dim must be 16, 32, 64 or 128, not ", dim);
    require(k.size(1) == heads && k.size(2) == dim && v.size(0) == k.size(0) && v.size(1) == heads && v.size(2) == dim,
            kOp, ": k and v must have shape (rows, ", heads, ", ", dim, ")");
    require(k_starts_.size(0) == q_starts_.size(0), kOp, ": queries and keys must be as many sequences");
    require(!biased || (line->dim() == 2 && line->size(0) == heads && line->size(1) % 2 == 1 && is_float(*line)), kOp,
            ": line must be (heads, 2R+1), of floats");
  }

  int64_t queries(int64_t s) const { return q_starts[s + 1] - q_starts[s]; }
  int64_t keys(int64_t s) const { return k_starts[s + 1] - k_starts[s]; }
  // A head's rows of a sequence that starts at `row`.
  static Head head(const Tensor& x, int64_t row, int64_t head) {
    return {static_cast<float*>(x.data_ptr()) + row * x.stride(0) + head * x.stride(1), x.stride(0)};
  }
  Head queries_of(const Tensor& x, int64_t s, int64_t h) const { return head(x, q_starts[s], h); }
  Head keys_of(const Tensor& x, int64_t s, int64_t h) const { return head(x, k_starts[s], h); }
  const float* bias_row(int64_t h, int64_t query) const {
    return distances.row(h) - distances.least() - q_positions[query];
  }

  static Tensor rows(const Tensor& x, const char* name) {
    require(x.dim() == 3 && x.scalar_type() == ScalarType::Float, kOp, ": ", name,
            " must be fp32 of shape (rows, heads, head_dim)");
    return x.stride(2) == 1 ? x : torch::stable::contiguous(x);
  }

 private:
  static const int32_t* positions(const Tensor& x, const char* name, int64_t rows) {
    require(x.dim() == 1 && x.scalar_type() == ScalarType::Int && x.is_contiguous() && x.size(0) == rows, kOp, ": ",
            name, " must be a contiguous int32 vector of ", rows);
    return static_cast<const int32_t*>(x.data_ptr());
  }
  static const int32_t* starts(const Tensor& x, const char* name, int64_t rows, int64_t& longest) {
    require(x.dim() == 1 && x.scalar_type() == ScalarType::Int && x.is_contiguous() && x.size(0) > 0, kOp, ": ", name,
            " must be a contiguous int32 vector");
    const auto* p = static_cast<const int32_t*>(x.data_ptr());
    bool ascend = p[0] == 0 && p[x.size(0) - 1] == rows;
    for (int64_t s = 0; s + 1 < x.size(0); ++s) {
      ascend = ascend && p[s] <= p[s + 1];
      longest = std::max<int64_t>(longest, p[s + 1] - p[s]);
    }
    require(ascend, kOp, ": ", name, " must ascend from 0 to ", rows);
    return p;
  }
};

// Floats of a thread, each piece at the start of a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : memory_(new float[static_cast<size_t>(floats + kPieces * kLine)]), next_(align(memory_.get())) {}
  float* take(int64_t floats) {
    float* piece = next_;
    next_ = align(next_ + floats);
    return piece;
  }

 private:
  static constexpr int64_t kLine = 16, kPieces = 12;
  static float* align(float* p) {
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) & ~static_cast<uintptr_t>(63));
  }
  std::unique_ptr<float[]> memory_;
  float* next_;
};

// 255 in the bytes of the weights that dropout keeps, in the order of the keys.
const uint8_t* kept(std::vector<uint8_t>& bytes, const Dropout& dropout, int64_t query, int64_t keys, int64_t head) {
  dropout.draw_weights(bytes.data(), query, keys, head);
  return bytes.data();
}

std::tuple<Tensor, Tensor> attention_native_fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> line,
                                                Tensor q_starts, Tensor k_starts, Tensor q_positions,
                                                Tensor k_positions, double scale, double dropout_p,
                                                std::optional<Tensor> seed, int64_t place) {
  const Call call(q, k, v, line, q_starts, k_starts, q_positions, k_positions, scale, dropout_p, seed, place);
  const int64_t dim = call.dim, total_queries = call.q.size(0);
  Tensor out = empty(q, {total_queries, call.heads, dim}, ScalarType::Float);
  Tensor lse = empty(q, {call.heads, total_queries}, ScalarType::Float);
  auto* statistics = static_cast<float*>(lse.data_ptr());
  torch::stable::parallel_for(0, call.sequences * call.heads, 1, [&](int64_t begin, int64_t end) {
    const int64_t widest = padded(call.longest_k), scores_size = std::max(kTile * widest, kBlockBytes / 4);
    Scratch scratch(scores_size + 2 * widest * dim);
    float* scores = scratch.take(scores_size);
    float *keys_t = scratch.take(widest * dim), *values = scratch.take(widest * dim);
    std::vector<uint8_t> bytes(call.dropout.on() ? Dropout::buffer_size(widest) : 0);
    std::vector<float> factors(kMostRows);
    Spans spans;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / call.heads, h = item % call.heads;
      const int64_t queries = call.queries(s), keys = call.keys(s), width = padded(keys), first = call.q_starts[s];
      float* lse_of = statistics + h * total_queries + first;
      const Head q_h = call.queries_of(call.q, s, h), out_h = call.queries_of(out, s, h);
      if (keys == 0) {
        for (int64_t i = 0; i < queries; ++i) {
          std::fill_n(out_h.row(i), dim, 0.0f);
          lse_of[i] = -kInfinity;
        }
        continue;
      }
      pack_rows(keys_t, call.keys_of(call.k, s, h), keys, dim, call.scale);
      pack_columns(values, call.keys_of(call.v, s, h), keys, dim, 1.0f);
      if (call.biased) spans.set(call.k_positions + call.k_starts[s], keys);
      const int64_t block = block_rows(queries, width);
      for (int64_t start = 0; start < queries; start += block) {
        const int64_t rows = std::min(block, queries - start);
        product<false, false>(rows, width, dim, q_h.row(start), q_h.stride, keys_t, dim * kPanel, scores, width);
        for (int64_t r = 0; r < rows; ++r) {
          float* row = scores + r * width;
          const int64_t query = first + start + r;
          if (call.biased) spans.add(row, call.bias_row(h, query));
          std::fill(row + keys, row + width, -kInfinity);
          Vec most[2] = {load<Vec>(row), load<Vec>(row + 8)};
          for (int64_t j = kPanel; j < width; j += kPanel) {
            const Vec left = load<Vec>(row + j), right = load<Vec>(row + j + 8);
            most[0] = left > most[0] ? left : most[0];
            most[1] = right > most[1] ? right : most[1];
          }
          const float top = largest(most[1] > most[0] ? most[1] : most[0]);
          Vec sums[2] = {};
          for (int64_t j = 0; j < width; j += kPanel) {
            const Vec left = exponential(load<Vec>(row + j) - top), right = exponential(load<Vec>(row + j + 8) - top);
            sums[0] += left;
            sums[1] += right;
            store<Vec>(row + j, left);
            store<Vec>(row + j + 8, right);
          }
          const float sum = total(sums[0] + sums[1]);
          lse_of[start + r] = top + std::log(sum);
          factors[r] = call.dropout.scale() / sum;
          if (call.dropout.on()) {
            const uint8_t* keep_bytes = kept(bytes, call.dropout, query, keys, h);
            for (int64_t j = 0; j < width; j += 8) store<Vec>(row + j, keep(load<Vec>(row + j), keep_bytes + j));
          }
        }
        product<false, false>(rows, dim, keys, scores, width, values, keys * kPanel, out_h.row(start), out_h.stride);
        for (int64_t r = 0; r < rows; ++r) {
          float* row = out_h.row(start + r);
          for (int64_t c = 0; c < dim; c += 8) store<Vec>(row + c, load<Vec>(row + c) * factors[r]);
        }
      }
    }
  });
  return {out, lse};
}

// What a thread of the backward pass works with, for one (sequence, head) after another.
class Backward {
 public:
  Backward(const Call& call, const Tensor& grad_out, const Tensor& lse, const Tensor& grad_q, const Tensor& grad_k,
           const Tensor& grad_v)
      : call_(call),
        grad_out_(grad_out),
        grad_q_(grad_q),
        grad_k_(grad_k),
        grad_v_(grad_v),
        lse_(static_cast<const float*>(lse.data_ptr())),
        widest_(padded(call.longest_k)),
        block_size_(std::max(kTile * widest_, kBlockBytes / 4)),
        scratch_(2 * block_size_ + 3 * widest_ * call.dim + 2 * kMostRows * call.dim + 2 * call.distances.stride()),
        weights_(scratch_.take(block_size_)),
        gradient_(scratch_.take(block_size_)),
        keys_t_(scratch_.take(widest_ * call.dim)),
        keys_(scratch_.take(widest_ * call.dim)),
        values_t_(scratch_.take(widest_ * call.dim)),
        queries_(scratch_.take(kMostRows * call.dim)),
        upstream_(scratch_.take(kMostRows * call.dim)),
        by_distance_(scratch_.take(2 * call.distances.stride())),
        bytes_(call.dropout.on() ? Dropout::buffer_size(widest_) : 0) {}

  // line: (2R+1,) what is added to the gradient of the head's line; null if it is not wanted.
  void run(int64_t s, int64_t h, double* line) {
    const int64_t queries = call_.queries(s), keys = call_.keys(s), width = padded(keys), dim = call_.dim;
    const Head q = call_.queries_of(call_.q, s, h);
    const Head up = call_.queries_of(grad_out_, s, h), to_q = call_.queries_of(grad_q_, s, h);
    const Head to_k = call_.keys_of(grad_k_, s, h), to_v = call_.keys_of(grad_v_, s, h);
    if (keys == 0 || queries == 0) {
      for (int64_t i = 0; i < queries; ++i) std::fill_n(to_q.row(i), dim, 0.0f);
      for (int64_t j = 0; j < keys; ++j) std::fill_n(to_k.row(j), dim, 0.0f);
      for (int64_t j = 0; j < keys; ++j) std::fill_n(to_v.row(j), dim, 0.0f);
      return;
    }
    const Head k = call_.keys_of(call_.k, s, h);
    pack_rows(keys_t_, k, keys, dim, call_.scale);
    pack_columns(keys_, k, keys, dim, call_.scale);
    pack_rows(values_t_, call_.keys_of(call_.v, s, h), keys, dim, call_.dropout.scale());
    if (call_.biased) spans_.set(call_.k_positions + call_.k_starts[s], keys);
    if (line != nullptr) std::fill_n(by_distance_, 2 * call_.distances.stride(), 0.0f);
    const int64_t block = block_rows(queries, width);
    for (int64_t start = 0; start < queries; start += block) {
      const int64_t rows = std::min(block, queries - start);
      product<false, false>(rows, width, dim, q.row(start), q.stride, keys_t_, dim * kPanel, weights_, width);
      product<false, false>(rows, width, dim, up.row(start), up.stride, values_t_, dim * kPanel, gradient_, width);
      for (int64_t r = 0; r < rows; ++r) scores_gradient(s, h, start + r, r, line != nullptr);
      product<false, false>(rows, dim, keys, gradient_, width, keys_, keys * kPanel, to_q.row(start), to_q.stride);
      const Head q_block = {q.row(start), q.stride}, up_block = {up.row(start), up.stride};
      pack_columns(queries_, q_block, rows, dim, call_.scale);
      pack_columns(upstream_, up_block, rows, dim, call_.dropout.scale());
      if (start == 0) {
        product<true, false>(keys, dim, rows, gradient_, width, queries_, rows * kPanel, to_k.data, to_k.stride);
        product<true, false>(keys, dim, rows, weights_, width, upstream_, rows * kPanel, to_v.data, to_v.stride);
      } else {
        product<true, true>(keys, dim, rows, gradient_, width, queries_, rows * kPanel, to_k.data, to_k.stride);
        product<true, true>(keys, dim, rows, weights_, width, upstream_, rows * kPanel, to_v.data, to_v.stride);
      }
    }
    if (line != nullptr) {
      call_.distances.fold(by_distance_, line);
      call_.distances.fold(by_distance_ + call_.distances.stride(), line);
    }
  }

 private:
  // Row r of the block: scores to weights as dropout leaves them, the weights' gradient to the scores'.
  void scores_gradient(int64_t s, int64_t h, int64_t i, int64_t r, bool line) {
    const int64_t keys = call_.keys(s), width = padded(keys), query = call_.q_starts[s] + i;
    float *weights = weights_ + r * width, *gradient = gradient_ + r * width;
    if (call_.biased) spans_.add(weights, call_.bias_row(h, query));
    std::fill(weights + keys, weights + width, -kInfinity);
    const float lse = lse_[h * call_.q.size(0) + query];
    const uint8_t* bytes = call_.dropout.on() ? kept(bytes_, call_.dropout, query, keys, h) : nullptr;
    Vec sums[2] = {};
    for (int64_t j = 0; j < width; j += kPanel) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t at = j + 8 * half;
        const Vec weight = exponential(load<Vec>(weights + at) - lse);
        Vec slope = load<Vec>(gradient + at);
        if (bytes != nullptr) slope = keep(slope, bytes + at);
        sums[half] += weight * slope;
        store<Vec>(weights + at, weight);
        store<Vec>(gradient + at, slope);
      }
    }
    const float mean = total(sums[0] + sums[1]);  // of the slopes: not from `out`, whose rounding would not cancel
    for (int64_t j = 0; j < width; j += 8) {
      const Vec weight = load<Vec>(weights + j);
      store<Vec>(gradient + j, weight * (load<Vec>(gradient + j) - mean));
      if (bytes != nullptr) store<Vec>(weights + j, keep(weight, bytes + j));
    }
    if (line) {
      spans_.add_back(gradient, by_distance_ - call_.distances.least() - call_.q_positions[query],
                      call_.distances.stride());
    }
  }

  const Call& call_;
  const Tensor &grad_out_, &grad_q_, &grad_k_, &grad_v_;
  const float* lse_;
  int64_t widest_, block_size_;
  Scratch scratch_;
  float *weights_, *gradient_, *keys_t_, *keys_, *values_t_, *queries_, *upstream_, *by_distance_;
  std::vector<uint8_t> bytes_;
  Spans spans_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_native_bwd(Tensor grad_out, Tensor q, Tensor k, Tensor v,
                                                                Tensor lse, std::optional<Tensor> line,
                                                                Tensor q_starts, Tensor k_starts, Tensor q_positions,
                                                                Tensor k_positions, bool line_gradient, double scale,
                                                                double dropout_p, std::optional<Tensor> seed,
                                                                int64_t place) {
  const Call call(q, k, v, line, q_starts, k_starts, q_positions, k_positions, scale, dropout_p, seed, place);
  grad_out = Call::rows(grad_out, "grad_out");
  require(grad_out.size(0) == call.q.size(0) && grad_out.size(1) == call.heads && grad_out.size(2) == call.dim, kOp,
          ": grad_out must have the shape of q");
  require(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() && lse.numel() == call.heads * call.q.size(0),
          kOp, ": lse must be what the forward pass returned");
  require(!line_gradient || line.has_value(), kOp, ": there is no line to differentiate by");
  const auto like = [&](const Tensor& x) { return empty(q, {x.size(0), call.heads, call.dim}, ScalarType::Float); };
  Tensor grad_q = like(call.q), grad_k = like(call.k), grad_v = like(call.v);
  const int64_t pieces = std::clamp<int64_t>(call.sequences, 1, kPiecesOfLine);
  const int64_t line_width = line_gradient ? line->size(1) : 0;
  std::vector<double> lines(static_cast<size_t>(pieces * call.heads * line_width));
  torch::stable::parallel_for(0, pieces * call.heads, 1, [&](int64_t begin, int64_t end) {
    Backward backward(call, grad_out, lse, grad_q, grad_k, grad_v);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t piece = item / call.heads, last = piece_begin(piece + 1, pieces, call.sequences);
      double* to = line_gradient ? lines.data() + item * line_width : nullptr;
      for (int64_t s = piece_begin(piece, pieces, call.sequences); s < last; ++s) {
        backward.run(s, item % call.heads, to);
      }
    }
  });
  if (!line_gradient) return {grad_q, grad_k, grad_v, empty(q, {0}, ScalarType::Float)};
  Tensor grad_line = empty(q, {call.heads, line_width}, ScalarType::Float);
  auto* sums = static_cast<float*>(grad_line.data_ptr());
  for (int64_t i = 0; i < call.heads * line_width; ++i) {
    double sum = 0.0;
    for (int64_t piece = 0; piece < pieces; ++piece) sum += lines[piece * call.heads * line_width + i];
    sums[i] = static_cast<float>(sum);
  }
  return {grad_q, grad_k, grad_v, torch::stable::to(grad_line, line->scalar_type())};
}

}  // namespace
}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CPU, library) {
  library.impl("attention_native_fwd", TORCH_BOX(&maelm::attention_native_fwd));
  library.impl("attention_native_bwd", TORCH_BOX(&maelm::attention_native_bwd));
}
