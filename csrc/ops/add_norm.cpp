// LayerNorm(residual + dropout(x)) on the CPU, and its gradient. Nothing but mean and rstd is kept between the two: the
// sum and the mask are computed again.

#include <tuple>

#include "dropout.h"
#include "rows.h"

namespace maelm {
namespace {

constexpr const char* kOp = "add_norm";

void check(Tensor& x, Tensor& residual) {
  require(x.dim() == 2 && x.size(1) > 0, kOp, ": x must have shape (rows, width)");
  const int64_t rows = x.size(0), width = x.size(1);
  x = row_major(x, kOp, "x", width);
  residual = row_major(residual, kOp, "residual", width);
  require(residual.size(0) == rows, kOp, ": residual must have ", rows, " rows, as x has");
}

std::tuple<Tensor, Tensor, Tensor> add_norm_native_fwd(Tensor x, Tensor residual, Tensor weight, Tensor bias,
                                                       double eps, double dropout_p, std::optional<Tensor> seed,
                                                       int64_t place) {
  check(x, residual);
  const int64_t rows = x.size(0), width = x.size(1);
  weight = parameter(weight, kOp, "weight", width);
  bias = parameter(bias, kOp, "bias", width);
  const Dropout dropout(dropout_p, seed, place, kOp);
  Tensor out = empty(x, {rows, width}, x.scalar_type());
  Tensor mean = empty(x, {rows}, ScalarType::Float);
  Tensor rstd = empty(x, {rows}, ScalarType::Float);
  const Rows of_x(x), of_residual(residual), to(out);
  const auto* w = static_cast<const float*>(weight.data_ptr());
  const auto* b = static_cast<const float*>(bias.data_ptr());
  auto* means = static_cast<float*>(mean.data_ptr());
  auto* rstds = static_cast<float*>(rstd.data_ptr());
  torch::stable::parallel_for(0, rows, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> total(width);
    Mask mask(dropout, width);
    for (int64_t row = begin; row < end; ++row) {
      const float sum = add_dropped(total.data(), of_x, of_residual, row, mask.of(row), width);
      const Moments m = moments(total.data(), width, eps, sum);
      normalise(to, row, total.data(), m, w, b, {}, width);
      means[row] = m.mean;
      rstds[row] = m.rstd;
    }
  });
  return {out, mean, rstd};
}

// The output's gradient is grad_out, plus grad_again if there is one. Without dropout the two inputs have one gradient:
// it is returned as grad_x, and grad_residual is empty. The bias has the weight's dtype.
std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm_native_bwd(Tensor grad_out, std::optional<Tensor> grad_again,
                                                               Tensor x, Tensor residual, Tensor weight, Tensor mean,
                                                               Tensor rstd, double dropout_p,
                                                               std::optional<Tensor> seed, int64_t place, bool) {
  check(x, residual);
  const int64_t rows = x.size(0), width = x.size(1);
  const Tensor weight32 = parameter(weight, kOp, "weight", width);
  grad_out = row_major(grad_out, kOp, "grad_out", width);
  require(grad_out.size(0) == rows, kOp, ": grad_out must have ", rows, " rows, as x has");
  const bool twice = grad_again.has_value();
  const Tensor other = twice ? row_major(*grad_again, kOp, "grad_again", width) : grad_out;
  require(other.size(0) == rows, kOp, ": grad_again must have ", rows, " rows, as x has");
  const Dropout dropout(dropout_p, seed, place, kOp);
  Tensor grad_x = empty(x, {rows, width}, x.scalar_type());
  Tensor grad_residual = dropout.on() ? empty(x, {rows, width}, residual.scalar_type())
                                      : empty(x, {0}, residual.scalar_type());

  enum { kWeight, kBias, kVectors };
  const int64_t pieces = pieces_of(rows);
  Partials partials(pieces, kVectors, width);
  const Rows of_x(x), of_residual(residual), grads(grad_out), others(other), to_x(grad_x), to_residual(grad_residual);
  const auto* w = static_cast<const float*>(weight32.data_ptr());
  const auto* means = static_cast<const float*>(mean.data_ptr());
  const auto* rstds = static_cast<const float*>(rstd.data_ptr());
  torch::stable::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> total(width), sum(width);
    Mask mask(dropout, width);
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t last = piece_begin(piece + 1, pieces, rows);
      for (int64_t row = piece_begin(piece, pieces, rows); row < last; ++row) {
        const Dropped dropped = mask.of(row);
        add_dropped(total.data(), of_x, of_residual, row, dropped, width);
        if (twice) add_dropped(sum.data(), grads, others, row, {}, width);
        const float* grad = twice ? sum.data() : view(grads, row, sum.data(), width);
        norm_backward(total.data(), grad, {means[row], rstds[row]}, w, partials.at(piece, kWeight),
                      partials.at(piece, kBias), width);
        if (dropped.keep == nullptr) {
          store_row(to_x, row, total.data(), width);
        } else {
          store_row(to_residual, row, total.data(), width);
          store_dropped(to_x, row, total.data(), dropped, width);
        }
      }
    }
  });
  return {grad_x, grad_residual, partials.total(kWeight, weight, weight.scalar_type()),
          partials.total(kBias, weight, weight.scalar_type())};
}

}  // namespace
}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CPU, library) {
  library.impl("add_norm_native_fwd", TORCH_BOX(&maelm::add_norm_native_fwd));
  library.impl("add_norm_native_bwd", TORCH_BOX(&maelm::add_norm_native_bwd));
}
