// The decoder's input on the CPU. The backward pass visits decoder slots in the order of their positions: a row of the
// position table is then summed by one thread, in one order, and everything else falls out of the same visit.

#include <algorithm>
#include <tuple>

#include "dropout.h"
#include "rows.h"

namespace maelm {
namespace {

constexpr const char* kOp = "scatter_to_decoder";

struct Inputs {
  Tensor encoder_out, mask_embedding, position_table;
  int64_t slots, encoder_rows, table_rows, width;
  std::vector<int64_t> source, positions;
  std::vector<uint8_t> used;  // (T,) whether a slot names the encoder row

  Inputs(const Tensor& encoder, const Tensor& source_map, const Tensor& mask, const Tensor& position_map,
         const Tensor& table)
      : slots(source_map.numel()), encoder_rows(encoder.size(0)), table_rows(table.size(0)), width(encoder.size(1)) {
    require(width > 0, kOp, ": encoder_out has no columns");
    encoder_out = row_major(encoder, kOp, "encoder_out", width);
    mask_embedding = parameter(mask, kOp, "mask_embedding", width);
    position_table = row_major(table, kOp, "position_table", width);
    require_index(source_map, kOp, "source", slots);
    require_index(position_map, kOp, "positions", slots);
    source = checked_index(source_map, -1, encoder_rows, kOp, "source", "the rows of encoder_out and -1 for [MASK]");
    positions = checked_index(position_map, 0, table_rows, kOp, "positions", "the rows of position_table");
    used.resize(static_cast<size_t>(encoder_rows));
    for (const int64_t row : source) {
      if (is_mask(row)) continue;
      require(!used[row], kOp, ": source names row ", row, " of encoder_out twice");
      used[row] = 1;
    }
  }
};

// The sums that LayerNorm normalises, before it.
class Sources {
 public:
  explicit Sources(const Inputs& in)
      : in_(in), encoder_(in.encoder_out), mask_(in.mask_embedding), table_(in.position_table) {}
  void read(float* x, int64_t slot, float* first, float* second) const {
    const int64_t row = in_.source[slot];
    const float* content = is_mask(row) ? view(mask_, 0, first, in_.width) : view(encoder_, row, first, in_.width);
    add_rows(x, content, view(table_, in_.positions[slot], second, in_.width), in_.width);
  }

 private:
  const Inputs& in_;
  Rows encoder_, mask_, table_;
};

std::tuple<Tensor, Tensor, Tensor> scatter_to_decoder_native_fwd(Tensor encoder_out, Tensor source,
                                                                 Tensor mask_embedding, Tensor positions,
                                                                 Tensor position_table, Tensor weight, Tensor bias,
                                                                 double eps) {
  const Inputs in(encoder_out, source, mask_embedding, positions, position_table);
  const int64_t width = in.width;
  weight = parameter(weight, kOp, "weight", width);
  bias = parameter(bias, kOp, "bias", width);
  Tensor out = empty(encoder_out, {in.slots, width}, encoder_out.scalar_type());
  Tensor mean = empty(encoder_out, {in.slots}, ScalarType::Float);
  Tensor rstd = empty(encoder_out, {in.slots}, ScalarType::Float);
  write_norms(Sources(in), in.slots, width, eps, weight, bias, Dropout(0.0, std::nullopt, 0, kOp), out, mean, rstd);
  return {out, mean, rstd};
}

// Gradients have the dtype of what they belong to; their sums are taken in fp32. The result does not depend on the
// number of threads, whatever `deterministic` says.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> scatter_to_decoder_native_bwd(
    Tensor grad_out, Tensor encoder_out, Tensor source, Tensor mask_embedding, Tensor positions, Tensor position_table,
    Tensor weight, Tensor bias, Tensor mean, Tensor rstd, bool) {
  const Inputs in(encoder_out, source, mask_embedding, positions, position_table);
  const int64_t width = in.width;
  const Tensor weight32 = parameter(weight, kOp, "weight", width);
  grad_out = row_major(grad_out, kOp, "grad_out", width);
  require(grad_out.size(0) == in.slots, kOp, ": grad_out must have ", in.slots, " rows");
  Tensor grad_encoder = empty(encoder_out, {in.encoder_rows, width}, encoder_out.scalar_type());
  Tensor grad_table = empty(position_table, {in.table_rows, width}, position_table.scalar_type());

  enum { kMask, kWeight, kBias, kVectors };
  const ByTableRow order(in.positions, in.table_rows);
  const int64_t pieces = pieces_of(in.slots + in.table_rows);
  Partials partials(pieces, kVectors, width);
  const Sources sources(in);
  const Rows grads(grad_out), to_encoder(grad_encoder), to_table(grad_table);
  const auto* w = static_cast<const float*>(weight32.data_ptr());
  const auto* means = static_cast<const float*>(mean.data_ptr());
  const auto* rstds = static_cast<const float*>(rstd.data_ptr());
  torch::stable::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> x(width), first(width), second(width), total(width);
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t last = order.piece_row(piece + 1, pieces);
      for (int64_t position = order.piece_row(piece, pieces); position < last; ++position) {
        std::fill(total.begin(), total.end(), 0.0f);
        for (int64_t i = order.begin[position]; i < order.begin[position + 1]; ++i) {
          const int64_t slot = order.rows[i], row = in.source[slot];
          sources.read(x.data(), slot, first.data(), second.data());
          const float* grad = view(grads, slot, first.data(), width);
          norm_backward(x.data(), grad, {means[slot], rstds[slot]}, w, partials.at(piece, kWeight),
                        partials.at(piece, kBias), width);
          accumulate(total.data(), x.data(), width);
          if (is_mask(row)) {
            accumulate(partials.at(piece, kMask), x.data(), width);
          } else {
            store_row(to_encoder, row, x.data(), width);
          }
        }
        store_row(to_table, position, total.data(), width);
      }
    }
  });
  const std::vector<float> zeros(width);
  for (int64_t row = 0; row < in.encoder_rows; ++row) {
    if (!in.used[row]) store_row(to_encoder, row, zeros.data(), width);
  }
  return {grad_encoder, partials.total(kMask, mask_embedding, mask_embedding.scalar_type()), grad_table,
          partials.total(kWeight, weight, weight.scalar_type()), partials.total(kBias, bias, bias.scalar_type())};
}

}  // namespace
}  // namespace maelm

STABLE_TORCH_LIBRARY_IMPL(maelm_fast, CPU, library) {
  library.impl("scatter_to_decoder_native_fwd", TORCH_BOX(&maelm::scatter_to_decoder_native_fwd));
  library.impl("scatter_to_decoder_native_bwd", TORCH_BOX(&maelm::scatter_to_decoder_native_bwd));
}
