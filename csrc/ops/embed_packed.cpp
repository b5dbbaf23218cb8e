// The encoder's input on the CPU: two table rows, LayerNorm, dropout. The backward pass goes over the rows twice: by
// position, computing the gradient of the sum (kept in fp32) and the position table's; then by token. Either way a
// table row is summed by one thread in one order.

#include <algorithm>
#include <tuple>

#include "dropout.h"
#include "rows.h"

namespace maelm {
namespace {

constexpr const char* kOp = "embed_packed";

struct Inputs {
  Tensor token_table, position_table;
  int64_t rows, width;
  std::vector<int64_t> ids, positions;

  Inputs(const Tensor& id_map, const Tensor& position_map, const Tensor& tokens, const Tensor& table)
      : rows(id_map.numel()), width(tokens.size(1)) {
    require(width > 0, kOp, ": token_table has no columns");
    token_table = row_major(tokens, kOp, "token_table", width);
    position_table = row_major(table, kOp, "position_table", width);
    require_index(id_map, kOp, "ids", rows);
    require_index(position_map, kOp, "positions", rows);
    ids = checked_index(id_map, 0, tokens.size(0), kOp, "ids", "the rows of token_table");
    positions = checked_index(position_map, 0, table.size(0), kOp, "positions", "the rows of position_table");
  }
};

class Sources {
 public:
  explicit Sources(const Inputs& in) : in_(in), tokens_(in.token_table), table_(in.position_table) {}
  void read(float* x, int64_t row, float* first, float* second) const {
    add_rows(x, view(tokens_, in_.ids[row], first, in_.width), view(table_, in_.positions[row], second, in_.width),
             in_.width);
  }

 private:
  const Inputs& in_;
  Rows tokens_, table_;
};

std::tuple<Tensor, Tensor, Tensor> embed_packed_native_fwd(Tensor ids, Tensor positions, Tensor token_table,
                                                           Tensor position_table, Tensor weight, Tensor bias,
                                                           double eps, double dropout_p, std::optional<Tensor> seed,
                                                           int64_t place, ScalarType type) {
  const Inputs in(ids, positions, token_table, position_table);
  const int64_t width = in.width;
  weight = parameter(weight, kOp, "weight", width);
  bias = parameter(bias, kOp, "bias", width);
  const Dropout dropout(dropout_p, seed, place, kOp);
  Tensor out = empty(token_table, {in.rows, width}, type);
  require(is_float(out), kOp, ": dtype must be fp32, bf16 or fp16");
  Tensor mean = empty(token_table, {in.rows}, ScalarType::Float);
  Tensor rstd = empty(token_table, {in.rows}, ScalarType::Float);
  write_norms(Sources(in), in.rows, width, eps, weight, bias, dropout, out, mean, rstd);
  return {out, mean, rstd};
}

// Gradients have the dtype of what they belong to (the bias: the weight's); their sums are taken in fp32.
std::tuple<Tensor, Tensor, Tensor, Tensor> embed_packed_native_bwd(Tensor grad_out, Tensor ids, Tensor positions,
                                                                   Tensor token_table, Tensor position_table,
                                                                   Tensor weight, Tensor mean, Tensor rstd,
                                                                   double dropout_p, std::optional<Tensor> seed,
                                                                   int64_t place, bool) {
  const Inputs in(ids, positions, token_table, position_table);
  const int64_t width = in.width;
  const Tensor weight32 = parameter(weight, kOp, "weight", width);
  grad_out = row_major(grad_out, kOp, "grad_out", width);
  require(grad_out.size(0) == in.rows, kOp, ": grad_out must have ", in.rows, " rows");
  const Dropout dropout(dropout_p, seed, place, kOp);
  Tensor grad_tokens = empty(token_table, {token_table.size(0), width}, token_table.scalar_type());
  Tensor grad_table = empty(position_table, {position_table.size(0), width}, position_table.scalar_type());
  Tensor grad_sum = empty(grad_out, {in.rows, width}, ScalarType::Float);

  enum { kWeight, kBias, kVectors };
  const ByTableRow by_position(in.positions, position_table.size(0)), by_token(in.ids, token_table.size(0));
  const int64_t pieces = pieces_of(in.rows + by_position.table_rows());
  Partials partials(pieces, kVectors, width);
  const Sources sources(in);
  const Rows grads(grad_out), to_table(grad_table), to_tokens(grad_tokens);
  auto* sums = static_cast<float*>(grad_sum.data_ptr());
  const auto* w = static_cast<const float*>(weight32.data_ptr());
  const auto* means = static_cast<const float*>(mean.data_ptr());
  const auto* rstds = static_cast<const float*>(rstd.data_ptr());
  torch::stable::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> first(width), second(width), total(width);
    Mask mask(dropout, width);
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t last = by_position.piece_row(piece + 1, pieces);
      for (int64_t position = by_position.piece_row(piece, pieces); position < last; ++position) {
        std::fill(total.begin(), total.end(), 0.0f);
        for (int64_t i = by_position.begin[position]; i < by_position.begin[position + 1]; ++i) {
          const int64_t row = by_position.rows[i];
          float* x = sums + row_offset(row, width);
          sources.read(x, row, first.data(), second.data());
          const float* grad = view(grads, row, first.data(), width);
          const Dropped dropped = mask.of(row);
          if (dropped.keep != nullptr) {
            drop(first.data(), grad, dropped, width);
            grad = first.data();
          }
          norm_backward(x, grad, {means[row], rstds[row]}, w, partials.at(piece, kWeight), partials.at(piece, kBias),
                        width);
          accumulate(total.data(), x, width);
        }
        store_row(to_table, position, total.data(), width);
      }
    }
  });
  const int64_t token_pieces = pieces_of(in.rows + by_token.table_rows());
  torch::stable::parallel_for(0, token_pieces, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> total(width);
    const std::vector<float> zeros(width);
    const int64_t last = by_token.piece_row(end, token_pieces);
    for (int64_t token = by_token.piece_row(begin, token_pieces); token < last; ++token) {
      const int64_t first = by_token.begin[token], stop = by_token.begin[token + 1];
      const float* sum = first == stop ? zeros.data() : sums + row_offset(by_token.rows[first], width);
      for (int64_t i = first + 1; i < stop; ++i) {
        add_rows(total.data(), sum, sums + row_offset(by_token.rows[i], width), width);
        sum = total.data();
      }
      store_row(to_tokens, token, sum, width);
    }
  });
  return {grad_tokens, grad_table, partials.total(kWeight, weight, weight.scalar_type()),
          partials.total(kBias, weight, weight.scalar_type())};
}

}  // namespace
}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CPU, library) {
  library.impl("embed_packed_native_fwd", TORCH_BOX(&maelm::embed_packed_native_fwd));
  library.impl("embed_packed_native_bwd", TORCH_BOX(&maelm::embed_packed_native_bwd));
}
