// The linear layer and the feed-forward sublayer in bf16, forward and backward, as products with what surrounds them:
// bias and GELU are done on the sums, GELU's gradient on those of the backward pass, and a bias's gradient is added up
// where its layer's gradient is packed. Parameters may be fp32; their gradients are, always.

#include <algorithm>
#include <tuple>

#include "bf16_products.h"
#include "cpu.h"

namespace maelm {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// (rows, width) in bf16, read as whole words.
Tensor words(const Tensor& tensor, const char* op, const char* name, int64_t width) {
  require(has_bf16_products(), op, ": this CPU lacks AVX-512 BF16");
  require(tensor.scalar_type() == ScalarType::BFloat16, op, ": ", name, " must be bf16");
  require(width % 2 == 0, op, ": ", name, " must have an even number of columns");
  const Tensor rows = row_major(tensor, op, name, width);
  return rows.size(0) > 1 && rows.stride(0) % 2 != 0 ? torch::stable::contiguous(rows) : rows;
}

// (out, in) in fp32 or bf16.
Tensor weights(const Tensor& tensor, const char* op, const char* name) {
  const ScalarType type = tensor.scalar_type();
  require(type == ScalarType::Float || type == ScalarType::BFloat16, op, ": ", name, " must be fp32 or bf16");
  require(tensor.dim() == 2 && tensor.size(0) > 0 && tensor.size(1) > 0, op, ": ", name, " must have shape (out, in)");
  return row_major(tensor, op, name, tensor.size(1));
}

Left left_of(const Tensor& x) { return {static_cast<const char*>(x.data_ptr()), x.stride(0) / 2, false}; }

Target target(Tensor& out, Finish finish = Finish::kPlain, const float* bias = nullptr) {
  Target to;
  to.finish = finish;
  to.out = out.data_ptr();
  to.stride = out.size(1);
  to.bias = bias;
  return to;
}

BFloat16* bf16(const Tensor& tensor) { return static_cast<BFloat16*>(tensor.data_ptr()); }

// finish(x weight^T), (rows, out).
void forward(const Tensor& x, const Tensor& weight, const Target& to) {
  multiply(left_of(x), Matrix(weight), true, to, x.size(0), weight.size(1), weight.size(0));
}

// finish(grad weight), (rows, in).
void backward(const Tensor& grad, const Tensor& weight, const Target& to) {
  multiply(left_of(grad), Matrix(weight), false, to, grad.size(0), weight.size(0), weight.size(1));
}

constexpr int64_t kDeep = 8192;  // what is summed at once; a vocabulary is larger, and its panels than the L2 cache

// grad weight, (rows, in).
Tensor backward(const Tensor& grad, const Tensor& weight) {
  const int64_t rows = grad.size(0), out = weight.size(0), in = weight.size(1);
  if (out <= kDeep) {
    Tensor result = empty(grad, {rows, in}, ScalarType::BFloat16);
    backward(grad, weight, target(result));
    return result;
  }
  Tensor sums = empty(grad, {rows, in}, ScalarType::Float);
  Target to = target(sums, Finish::kWide);
  for (int64_t start = 0; start < out; start += kDeep / 4, to.add = true) {
    Left left = left_of(grad);
    left.data += start * 2;
    Matrix below(weight);
    below.data = below.at(start, 0);
    multiply(left, below, false, to, rows, std::min(kDeep / 4, out - start), in);
  }
  return torch::stable::to(sums, ScalarType::BFloat16);
}

// Gradients of weight (out, in) and bias (out,).
std::tuple<Tensor, Tensor> of_parameters(const Tensor& grad, const Tensor& x) {
  const int64_t out = grad.size(1), in = x.size(1);
  Tensor weight = empty(x, {out, in}, ScalarType::Float), bias = empty(x, {out}, ScalarType::Float);
  multiply_transposed(Matrix(grad), Matrix(x), static_cast<float*>(weight.data_ptr()),
                      static_cast<float*>(bias.data_ptr()), out, x.size(0), in);
  return {weight, bias};
}

Tensor none(const Tensor& like, ScalarType type) { return empty(like, {0}, type); }

Tensor linear_native_fwd(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  constexpr const char* kOp = "linear";
  weight = weights(weight, kOp, "weight");
  x = words(x, kOp, "x", weight.size(1));
  if (bias.has_value()) bias = parameter(*bias, kOp, "bias", weight.size(0));
  Tensor out = empty(x, {x.size(0), weight.size(0)}, ScalarType::BFloat16);
  forward(x, weight, target(out, Finish::kPlain, bias.has_value() ? static_cast<float*>(bias->data_ptr()) : nullptr));
  return out;
}

Gradients linear_native_bwd(Tensor grad_out, Tensor x, Tensor weight, bool x_gradient, bool weight_gradient) {
  constexpr const char* kOp = "linear";
  weight = weights(weight, kOp, "weight");
  x = words(x, kOp, "x", weight.size(1));
  grad_out = words(grad_out, kOp, "grad_out", weight.size(0));
  require(grad_out.size(0) == x.size(0), kOp, ": grad_out must have as many rows as x");
  Tensor grad_x = none(x, ScalarType::BFloat16), grad_weight = none(x, ScalarType::Float);
  Tensor grad_bias = none(x, ScalarType::Float);
  if (x_gradient) grad_x = backward(grad_out, weight);
  if (weight_gradient) std::tie(grad_weight, grad_bias) = of_parameters(grad_out, x);
  return {grad_x, grad_weight, grad_bias};
}

constexpr const char* kFeedForward = "feed_forward";

void check(Tensor& x, Tensor& weight_in, Tensor& weight_out) {
  weight_in = weights(weight_in, kFeedForward, "weight_in");
  weight_out = weights(weight_out, kFeedForward, "weight_out");
  require(weight_out.size(1) == weight_in.size(0), kFeedForward, ": weight_out must have a column for each of ",
          weight_in.size(0), " rows of weight_in");
  x = words(x, kFeedForward, "x", weight_in.size(1));
}

// The result and the first product with its bias, which the backward pass needs.
std::tuple<Tensor, Tensor> feed_forward_native_fwd(Tensor x, Tensor weight_in, Tensor bias_in, Tensor weight_out,
                                                   Tensor bias_out) {
  check(x, weight_in, weight_out);
  const int64_t rows = x.size(0), inner = weight_in.size(0), width = weight_out.size(0);
  bias_in = parameter(bias_in, kFeedForward, "bias_in", inner);
  bias_out = parameter(bias_out, kFeedForward, "bias_out", width);
  Tensor h = empty(x, {rows, inner}, ScalarType::BFloat16), activated = empty(x, {rows, inner}, ScalarType::BFloat16);
  Target to = target(h, Finish::kGelu, static_cast<float*>(bias_in.data_ptr()));
  to.activated = bf16(activated);
  forward(x, weight_in, to);
  Tensor out = empty(x, {rows, width}, ScalarType::BFloat16);
  forward(words(activated, kFeedForward, "h", inner), weight_out,
          target(out, Finish::kPlain, static_cast<float*>(bias_out.data_ptr())));
  return {out, h};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> feed_forward_native_bwd(Tensor grad_out, Tensor x, Tensor h,
                                                                           Tensor weight_in, Tensor weight_out,
                                                                           bool x_gradient, bool weight_gradient) {
  check(x, weight_in, weight_out);
  const int64_t rows = x.size(0), inner = weight_in.size(0);
  grad_out = words(grad_out, kFeedForward, "grad_out", weight_out.size(0));
  h = torch::stable::contiguous(words(h, kFeedForward, "h", inner));
  require(grad_out.size(0) == rows && h.size(0) == rows, kFeedForward, ": grad_out and h must have as many rows as x");
  Tensor grad_h = empty(x, {rows, inner}, ScalarType::BFloat16);
  Tensor activated = empty(x, {rows, inner}, ScalarType::BFloat16);
  Target to = target(grad_h, Finish::kGeluBackward);
  to.before = bf16(h);
  to.activated = bf16(activated);
  backward(grad_out, weight_out, to);
  Tensor grad_x = none(x, ScalarType::BFloat16), grad_in = none(x, ScalarType::Float);
  Tensor bias_in = none(x, ScalarType::Float), bias_out = none(x, ScalarType::Float);
  Tensor grad_weight_out = none(x, ScalarType::Float);
  if (x_gradient) grad_x = backward(grad_h, weight_in);
  if (weight_gradient) {
    std::tie(grad_weight_out, bias_out) = of_parameters(grad_out, activated);
    std::tie(grad_in, bias_in) = of_parameters(grad_h, x);
  }
  return {grad_x, grad_in, bias_in, grad_weight_out, bias_out};
}

}  // namespace
}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CompositeExplicitAutograd, library) {
  library.impl("fast_bf16_products", TORCH_BOX(&maelm::fast_bf16_products));
}

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CPU, library) {
  library.impl("linear_native_fwd", TORCH_BOX(&maelm::linear_native_fwd));
  library.impl("linear_native_bwd", TORCH_BOX(&maelm::linear_native_bwd));
  library.impl("feed_forward_native_fwd", TORCH_BOX(&maelm::feed_forward_native_fwd));
  library.impl("feed_forward_native_bwd", TORCH_BOX(&maelm::feed_forward_native_bwd));
}
