// The schemas of the compiled ops, and an empty Python module to carry them. Their fake and autograd functions are
// registered in maelm_fast/ops; each kernel is registered beside its code.

#include <Python.h>

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(maelm_fast, library) {
  library.def(
      "scatter_to_decoder_native_fwd(Tensor encoder_out, Tensor source, Tensor mask_embedding, Tensor positions, "
      "Tensor position_table, Tensor weight, Tensor bias, float eps) -> (Tensor out, Tensor mean, Tensor rstd)");
  library.def(
      "scatter_to_decoder_native_bwd(Tensor grad_out, Tensor encoder_out, Tensor source, Tensor mask_embedding, "
      "Tensor positions, Tensor position_table, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, "
      "bool deterministic) -> (Tensor grad_encoder, Tensor grad_mask, Tensor grad_position_table, "
      "Tensor grad_weight, Tensor grad_bias)");
  library.def(
      "add_norm_native_fwd(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps, float dropout_p, "
      "Tensor? seed, int place) -> (Tensor out, Tensor mean, Tensor rstd)");
  library.def(
      "add_norm_native_bwd(Tensor grad_out, Tensor? grad_again, Tensor x, Tensor residual, Tensor weight, Tensor mean, "
      "Tensor rstd, float dropout_p, Tensor? seed, int place, bool deterministic) -> (Tensor grad_x, "
      "Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)");
  library.def(
      "embed_packed_native_fwd(Tensor ids, Tensor positions, Tensor token_table, Tensor position_table, "
      "Tensor weight, Tensor bias, float eps, float dropout_p, Tensor? seed, int place, ScalarType dtype) -> "
      "(Tensor out, Tensor mean, Tensor rstd)");
  library.def(
      "embed_packed_native_bwd(Tensor grad_out, Tensor ids, Tensor positions, Tensor token_table, "
      "Tensor position_table, Tensor weight, Tensor mean, Tensor rstd, float dropout_p, Tensor? seed, int place, "
      "bool deterministic) -> (Tensor grad_token_table, Tensor grad_position_table, Tensor grad_weight, "
      "Tensor grad_bias)");
  library.def(
      "attention_native_fwd(Tensor q, Tensor k, Tensor v, Tensor? line, Tensor q_starts, Tensor k_starts, "
      "Tensor q_positions, Tensor k_positions, float scale, float dropout_p, Tensor? seed, int place) -> "
      "(Tensor out, Tensor lse)");
  library.def(
      "attention_native_bwd(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor? line, "
      "Tensor q_starts, Tensor k_starts, Tensor q_positions, Tensor k_positions, bool line_gradient, float scale, "
      "float dropout_p, Tensor? seed, int place, int stacked) -> (Tensor[] gradients, Tensor grad_line)");
  library.def("fast_bf16_products() -> bool");
  library.def("linear_native_fwd(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def(
      "linear_native_bwd(Tensor grad_out, Tensor x, Tensor weight, bool x_gradient, bool weight_gradient) -> "
      "(Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
  library.def(
      "loss_rows_native_fwd(Tensor logits, Tensor labels, int vocab_size, float z_loss) -> (Tensor losses, Tensor hits, "
      "Tensor lse)");
  library.def(
      "loss_rows_native_bwd(Tensor grad, Tensor logits, Tensor labels, Tensor lse, int vocab_size, float z_loss) -> "
      "Tensor");
  library.def(
      "feed_forward_native_fwd(Tensor x, Tensor weight_in, Tensor bias_in, Tensor weight_out, Tensor bias_out) -> "
      "(Tensor out, Tensor h)");
  library.def(
      "feed_forward_native_bwd(Tensor grad_out, Tensor x, Tensor h, Tensor weight_in, Tensor weight_out, "
      "bool x_gradient, bool weight_gradient) -> (Tensor grad_x, Tensor grad_weight_in, Tensor grad_bias_in, "
      "Tensor grad_weight_out, Tensor grad_bias_out)");
  library.def(
      "keep_weights_native_fwd(Tensor rows, int heads, int columns, float p, Tensor seed, int place, ScalarType dtype) "
      "-> Tensor");
}

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
