// Passes over one row in fp32. Variance is the mean of squared distances from the mean, in a pass of its own: a row is
// in the L1 cache, and the one-pass formula cancels.

#include "rows.h"

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace maelm {
namespace {

template <class F>
void with_type(ScalarType type, F&& f) {
  if (type == ScalarType::Float) {
    f(static_cast<float*>(nullptr));
  } else if (type == ScalarType::BFloat16) {
    f(static_cast<BFloat16*>(nullptr));
  } else {
    f(static_cast<Half*>(nullptr));
  }
}

template <bool kDrop, class Out>
void normalise_as(Out* out, const float* x, Moments m, const float* weight, const float* bias, Dropped dropped,
                  int64_t width) {
  each(width, [&](auto step, int64_t i) {
    using S = typename decltype(step)::type;
    S y = (load<S>(x + i) - m.mean) * m.rstd * load<S>(weight + i) + load<S>(bias + i);
    if constexpr (kDrop) y = keep(y * dropped.scale, dropped.keep + i);
    store<S>(out + i, y);
  });
}

template <bool kDrop, class X, class Residual>
float add_dropped_as(float* total, const X* x, const Residual* residual, Dropped dropped, int64_t width) {
  Sum sum;
  each(width, [&](auto step, int64_t i) {
    using S = typename decltype(step)::type;
    S y = load<S>(x + i);
    if constexpr (kDrop) y = keep(y * dropped.scale, dropped.keep + i);
    y = load<S>(residual + i) + y;
    store<S>(total + i, y);
    sum.add<decltype(step)::chain>(y);
  });
  return sum.total();
}

}  // namespace

const float* view(const Rows& rows, int64_t row, float* buffer, int64_t width) {
  if (rows.type() == ScalarType::Float) return reinterpret_cast<const float*>(rows.row(row));
  with_type(rows.type(), [&](auto* type) {
    const auto* from = reinterpret_cast<decltype(type)>(rows.row(row));
    each(width, [&](auto step, int64_t i) {
      using S = typename decltype(step)::type;
      store<S>(buffer + i, load<S>(from + i));
    });
  });
  return buffer;
}

void store_row(const Rows& rows, int64_t row, const float* x, int64_t width) {
  with_type(rows.type(), [&](auto* type) {
    auto* to = reinterpret_cast<decltype(type)>(rows.row(row));
    each(width, [&](auto step, int64_t i) {
      using S = typename decltype(step)::type;
      store<S>(to + i, load<S>(x + i));
    });
  });
}

void add_rows(float* out, const float* a, const float* b, int64_t width) {
  each(width, [&](auto step, int64_t i) {
    using S = typename decltype(step)::type;
    store<S>(out + i, load<S>(a + i) + load<S>(b + i));
  });
}

void accumulate(float* total, const float* x, int64_t width) { add_rows(total, total, x, width); }

float add_dropped(float* total, const Rows& x, const Rows& residual, int64_t row, Dropped dropped, int64_t width) {
  float sum = 0.0f;
  with_type(x.type(), [&](auto* of_x) {
    with_type(residual.type(), [&](auto* of_residual) {
      const auto* a = reinterpret_cast<decltype(of_x)>(x.row(row));
      const auto* b = reinterpret_cast<decltype(of_residual)>(residual.row(row));
      sum = dropped.keep == nullptr ? add_dropped_as<false>(total, a, b, dropped, width)
                                    : add_dropped_as<true>(total, a, b, dropped, width);
    });
  });
  return sum;
}

void store_dropped(const Rows& out, int64_t row, const float* x, Dropped dropped, int64_t width) {
  with_type(out.type(), [&](auto* type) {
    auto* to = reinterpret_cast<decltype(type)>(out.row(row));
    each(width, [&](auto step, int64_t i) {
      using S = typename decltype(step)::type;
      store<S>(to + i, keep(load<S>(x + i) * dropped.scale, dropped.keep + i));
    });
  });
}

void drop(float* out, const float* x, Dropped dropped, int64_t width) {
  each(width, [&](auto step, int64_t i) {
    using S = typename decltype(step)::type;
    store<S>(out + i, keep(load<S>(x + i) * dropped.scale, dropped.keep + i));
  });
}

Moments moments(const float* x, int64_t width, double eps) {
  Sum sum;
  each(width, [&](auto step, int64_t i) {
    using S = typename decltype(step)::type;
    sum.add<decltype(step)::chain>(load<S>(x + i));
  });
  return moments(x, width, eps, sum.total());
}

Moments moments(const float* x, int64_t width, double eps, float sum) {
  const float mean = sum / static_cast<float>(width);
  Sum squares;
  each(width, [&](auto step, int64_t i) {
    using S = typename decltype(step)::type;
    const S distance = load<S>(x + i) - mean;
    squares.add<decltype(step)::chain>(distance * distance);
  });
  return {mean, 1.0f / std::sqrt(squares.total() / static_cast<float>(width) + static_cast<float>(eps))};
}

void normalise(const Rows& out, int64_t row, const float* x, Moments m, const float* weight, const float* bias,
               Dropped dropped, int64_t width) {
  with_type(out.type(), [&](auto* type) {
    auto* to = reinterpret_cast<decltype(type)>(out.row(row));
    if (dropped.keep == nullptr) {
      normalise_as<false>(to, x, m, weight, bias, dropped, width);
    } else {
      normalise_as<true>(to, x, m, weight, bias, dropped, width);
    }
  });
}

void norm_backward(float* x, const float* grad, Moments m, const float* weight, float* grad_weight, float* grad_bias,
                   int64_t width) {
  Sum sum, product;
  each(width, [&](auto step, int64_t i) {
    using S = typename decltype(step)::type;
    constexpr int kChain = decltype(step)::chain;
    const S normal = (load<S>(x + i) - m.mean) * m.rstd, g = load<S>(grad + i), inner = g * load<S>(weight + i);
    store<S>(x + i, normal);
    store<S>(grad_weight + i, load<S>(grad_weight + i) + g * normal);
    store<S>(grad_bias + i, load<S>(grad_bias + i) + g);
    sum.add<kChain>(inner);
    product.add<kChain>(inner * normal);
  });
  const float mean = sum.total() / static_cast<float>(width), slope = product.total() / static_cast<float>(width);
  each(width, [&](auto step, int64_t i) {
    using S = typename decltype(step)::type;
    const S inner = load<S>(grad + i) * load<S>(weight + i);
    store<S>(x + i, (inner - mean - load<S>(x + i) * slope) * m.rstd);
  });
}

Tensor Partials::total(int64_t vector, const Tensor& like, ScalarType type) {
  for (int64_t piece = 1; piece < pieces_; ++piece) accumulate(at(0, vector), at(piece, vector), width_);
  Tensor out = empty(like, {width_}, type);
  store_row(Rows(out), 0, at(0, vector), width_);
  return out;
}

std::vector<int64_t> checked_index(const Tensor& index, int64_t low, int64_t high, const char* op, const char* name,
                                   const char* bound) {
  const int64_t count = index.size(0), stride = index.stride(0);
  std::vector<int64_t> values(static_cast<size_t>(count));
  const void* data = index.data_ptr();
  const bool wide = index.scalar_type() == ScalarType::Long;
  for (int64_t i = 0; i < count; ++i) values[i] = index_at(data, wide, i * stride);
  for (int64_t i = 0; i < count; ++i) {
    require(values[i] >= low && values[i] < high, op, ": ", name, "[", i, "] is ", values[i], ", outside [", low, ", ",
            high, "), ", bound);
  }
  return values;
}

ByTableRow::ByTableRow(const std::vector<int64_t>& index, int64_t table_rows)
    : begin(static_cast<size_t>(table_rows) + 1), rows(index.size()) {
  for (const int64_t row : index) ++begin[row + 1];
  for (int64_t row = 0; row < table_rows; ++row) begin[row + 1] += begin[row];
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (size_t i = 0; i < index.size(); ++i) rows[next[index[i]]++] = static_cast<int64_t>(i);
}

int64_t ByTableRow::piece_row(int64_t piece, int64_t pieces) const {
  if (piece == pieces) return table_rows();
  const int64_t target = piece_begin(piece, pieces, table_rows() + static_cast<int64_t>(rows.size()));
  int64_t low = 0, high = table_rows();
  while (low < high) {  // the first table row with at least `target` rows, of both kinds, before it
    const int64_t middle = (low + high) / 2;
    if (begin[middle] + middle < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace maelm
