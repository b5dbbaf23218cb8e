// maelm_fast._host: the torch-free host code for NumPy arrays. The only file here that knows Python.
//
// What a caller could get wrong so that memory would be read or written out of bounds is checked here (ValueError);
// what a user could get wrong is checked by the Python functions, once for every implementation. The GIL is released
// while anything of the size of the tokens is computed.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "masking.h"
#include "memory.h"
#include "order.h"
#include "packing.h"

namespace py = pybind11;

namespace {

using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Int32Array = py::array_t<int32_t>;

void check(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

py::tuple to_tuple(const std::vector<int32_t>& values) {
  py::tuple tuple(values.size());
  for (size_t i = 0; i < values.size(); ++i) tuple[i] = py::int_(values[i]);
  return tuple;
}

template <typename Token>
py::dict pack_as(const py::array& ids, const Int64Array& lengths, const Int64Array& samples, const Int64Array& epochs,
                 const maelm::MaskingOptions& options) {
  const maelm::Sequences<Token> sequences{static_cast<const Token*>(ids.data()), lengths.data(), samples.data(),
                                          epochs.data(), lengths.size()};
  maelm::Choice choice;
  {
    py::gil_scoped_release released;
    choice = maelm::choose(sequences, options);
  }
  Int32Array visible_ids(choice.visible_tokens), visible_positions(choice.visible_tokens), source(choice.tokens),
      decoder_positions(choice.tokens), masked_index(choice.masked_tokens), labels(choice.masked_tokens),
      cu_seqlens(sequences.count + 1), decoder_cu_seqlens(sequences.count + 1), masked_cu_seqlens(sequences.count + 1);
  const maelm::PackedArrays out{visible_ids.mutable_data(),        visible_positions.mutable_data(),
                                cu_seqlens.mutable_data(),         source.mutable_data(),
                                decoder_positions.mutable_data(),  decoder_cu_seqlens.mutable_data(),
                                masked_index.mutable_data(),       masked_cu_seqlens.mutable_data(),
                                labels.mutable_data()};
  {
    py::gil_scoped_release released;
    maelm::compact(sequences, options, choice, out);
  }
  py::dict result;
  result["visible_ids"] = visible_ids;
  result["visible_positions"] = visible_positions;
  result["cu_seqlens"] = cu_seqlens;
  result["source"] = source;
  result["decoder_positions"] = decoder_positions;
  result["decoder_cu_seqlens"] = decoder_cu_seqlens;
  result["masked_index"] = masked_index;
  result["masked_cu_seqlens"] = masked_cu_seqlens;
  result["labels"] = labels;
  result["lengths"] = to_tuple(choice.visible);
  result["masked_lengths"] = to_tuple(choice.masked);
  return result;
}

bool all_words(const Int64Array& values) {
  constexpr int64_t kLargest = std::numeric_limits<uint32_t>::max();
  return std::all_of(values.data(), values.data() + values.size(),
                     [](int64_t value) { return value >= 0 && value <= kLargest; });
}

py::dict pack(const py::array& ids, const Int64Array& lengths, const Int64Array& samples, const Int64Array& epochs,
              double rate, bool stochastic, bool special_tokens, bool bert, bool encoder_sees_mask, int64_t vocab_size,
              int64_t mask_id, std::vector<int64_t> special, uint64_t seed) {
  check(ids.ndim() == 1 && (ids.flags() & py::array::c_style) != 0, "ids must be one contiguous row");
  check(lengths.ndim() == 1 && samples.ndim() == 1 && epochs.ndim() == 1, "lengths, samples, epochs must be 1-D");
  check(samples.size() == lengths.size() && epochs.size() == lengths.size(), "one sample and epoch per sequence");
  check(all_words(samples) && all_words(epochs), "samples and epochs must be 32-bit words");
  check(all_words(lengths), "lengths must not be negative");
  int64_t total = 0;
  for (py::ssize_t s = 0; s < lengths.size(); ++s) total += lengths.data()[s];
  check(total == ids.size() && total <= std::numeric_limits<int32_t>::max(), "lengths must sum to the number of ids");
  const auto is_token = [&](int64_t id) { return id >= 0 && id < vocab_size; };
  special.erase(std::remove_if(special.begin(), special.end(), [&](int64_t id) { return !is_token(id); }),
                special.end());
  std::sort(special.begin(), special.end());
  special.erase(std::unique(special.begin(), special.end()), special.end());
  check(!bert || static_cast<int64_t>(special.size()) < vocab_size, "every token of the vocabulary is special");
  const maelm::MaskingOptions options{rate,    stochastic, special_tokens,     bert, encoder_sees_mask, vocab_size,
                                      mask_id, std::move(special), seed};
  if (py::isinstance<py::array_t<uint16_t>>(ids)) return pack_as<uint16_t>(ids, lengths, samples, epochs, options);
  if (py::isinstance<py::array_t<uint32_t>>(ids)) return pack_as<uint32_t>(ids, lengths, samples, epochs, options);
  if (py::isinstance<py::array_t<int32_t>>(ids)) return pack_as<int32_t>(ids, lengths, samples, epochs, options);
  if (py::isinstance<py::array_t<int64_t>>(ids)) return pack_as<int64_t>(ids, lengths, samples, epochs, options);
  throw std::invalid_argument("ids must be uint16, uint32, int32 or int64");
}

std::pair<Int32Array, int64_t> best_fit(const Int64Array& lengths, int64_t budget) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  check(lengths.ndim() == 1 && lengths.size() <= kLargest, "lengths must be 1-D");
  check(budget <= kLargest, "budget must be below 2**31");
  check(std::all_of(lengths.data(), lengths.data() + lengths.size(),
                    [budget](int64_t length) { return length >= 1 && length <= budget; }),
        "lengths must lie in [1, budget]");
  Int32Array bins(lengths.size());
  int32_t* out = bins.mutable_data();
  int64_t opened = 0;
  {
    py::gil_scoped_release released;
    opened = maelm::best_fit(lengths.data(), lengths.size(), budget, out);
  }
  return {bins, opened};
}

Int64Array permute(const Int64Array& index, int64_t size, int half_bits, int rounds, uint64_t seed, uint32_t epoch) {
  check(index.ndim() == 1, "index must be 1-D");
  check(1 <= half_bits && half_bits <= 32, "half_bits must lie in [1, 32]");
  // The network never gets back inside from outside its domain, so these would not end.
  check(half_bits == 32 || size <= int64_t{1} << (2 * half_bits), "size is larger than the network's domain");
  check(std::all_of(index.data(), index.data() + index.size(), [size](int64_t i) { return i >= 0 && i < size; }),
        "index outside [0, size)");
  Int64Array ids(index.size());
  int64_t* out = ids.mutable_data();
  {
    py::gil_scoped_release released;
    maelm::permute(index.data(), index.size(), size, half_bits, rounds, seed, epoch, out);
  }
  return ids;
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  using namespace pybind11::literals;
  module.doc() = "Host code of maelm_fast; called by maelm_fast.data, which checks the arguments.";
  module.def("pack", &pack, py::kw_only(), "ids"_a.noconvert(), "lengths"_a, "samples"_a, "epochs"_a, "rate"_a,
             "stochastic"_a, "special_tokens"_a, "bert"_a, "encoder_sees_mask"_a, "vocab_size"_a, "mask_id"_a,
             "special"_a, "seed"_a, "The tensors of a PackedBatch, as NumPy arrays by name.");
  module.def("best_fit", &best_fit, "lengths"_a, "budget"_a, "(bin of each item, number of bins).");
  module.def("permute", &permute, "index"_a, "size"_a, "half_bits"_a, "rounds"_a, "seed"_a, "epoch"_a,
             "The samples at these places of an epoch's order.");
  module.def("keep_freed_memory", &maelm::keep_freed_memory,
             "Keep large freed blocks in the process; False where the C library is not glibc.");
}
