// maelm_fast._host: the torch-free host code for NumPy arrays. The only file here that knows Python.
//
// What a caller could get wrong so that memory would be read or written out of bounds is checked here (ValueError);
// what a user could get wrong is checked by the Python functions, once for every implementation. The GIL is released
// while anything of the size of the tokens is computed.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "masking.h"
#include "memory.h"
#include "order.h"
#include "packing.h"
#include "samples.h"

namespace py = pybind11;

namespace {

using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Int32Array = py::array_t<int32_t>;

void check(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

int64_t aligned(int64_t size, int64_t alignment) { return (size + alignment - 1) / alignment * alignment; }

py::tuple to_tuple(const std::vector<int32_t>& values) {
  py::tuple tuple(values.size());
  for (size_t i = 0; i < values.size(); ++i) tuple[i] = py::int_(values[i]);
  return tuple;
}

constexpr int kTensors = 10;  // of a PackedBatch
using Sizes = std::array<int64_t, kTensors>;

// In the order of PackedBatch.tensors in maelm_fast/batch.py, as `placed` has them.
Sizes sizes_of(const maelm::Choice& choice) {
  const auto bounds = static_cast<int64_t>(choice.visible.size()) + 1;
  const int64_t visible = choice.visible_tokens, original = choice.tokens, masked = choice.masked_tokens;
  return {visible, original, masked, masked, bounds, visible, bounds, original, bounds, masked};
}

maelm::PackedArrays placed(const std::array<int32_t*, kTensors>& at) {
  return {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9]};
}

template <typename Token>
py::tuple pack_as(const py::array& ids, const Int64Array& lengths, const Int64Array& samples, const Int64Array& epochs,
                  const std::vector<int64_t>& counts, int64_t alignment, const py::function& allocate,
                  const maelm::MaskingOptions& options) {
  std::vector<maelm::Sequences<Token>> batches;
  std::vector<maelm::Choice> choices(counts.size());
  std::vector<Sizes> sizes;
  int64_t elements = 0;
  {
    py::gil_scoped_release released;
    auto token = static_cast<const Token*>(ids.data());
    int64_t first = 0;
    for (size_t b = 0; b < counts.size(); ++b) {
      batches.push_back({token, lengths.data() + first, samples.data() + first, epochs.data() + first, counts[b]});
      choices[b] = maelm::choose(batches[b], options);
      sizes.push_back(sizes_of(choices[b]));
      for (const int64_t size : sizes[b]) elements += aligned(size, alignment);
      token += choices[b].tokens;
      first += counts[b];
    }
  }
  Int32Array row = allocate(elements);
  check(row.ndim() == 1 && row.size() == elements && (row.flags() & py::array::c_style) != 0,
        "allocate must return a contiguous row of as many int32 as asked for");
  int32_t* place = row.mutable_data();
  {
    py::gil_scoped_release released;
    for (size_t b = 0; b < counts.size(); ++b) {
      std::array<int32_t*, kTensors> at;
      for (int i = 0; i < kTensors; ++i) {
        at[i] = place;
        place += aligned(sizes[b][i], alignment);
      }
      maelm::compact(batches[b], options, choices[b], placed(at));
    }
  }
  py::list visible, masked;
  for (const maelm::Choice& choice : choices) {
    visible.append(to_tuple(choice.visible));
    masked.append(to_tuple(choice.masked));
  }
  return py::make_tuple(visible, masked);
}

maelm::Policy policy_of(const std::string& name) {
  if (name == "mask") return maelm::Policy::kMask;
  if (name == "bert") return maelm::Policy::kBert;
  check(name == "random", "policy must be mask, bert or random");
  return maelm::Policy::kRandom;
}

bool all_words(const Int64Array& values) {
  constexpr int64_t kLargest = std::numeric_limits<uint32_t>::max();
  return std::all_of(values.data(), values.data() + values.size(),
                     [](int64_t value) { return value >= 0 && value <= kLargest; });
}

py::tuple pack(const py::array& ids, const Int64Array& lengths, const Int64Array& samples, const Int64Array& epochs,
               const std::vector<int64_t>& counts, int64_t alignment, const py::function& allocate, double rate,
               bool stochastic, bool special_tokens, const std::string& policy_name, double shown,
               int64_t vocab_size, int64_t mask_id, std::vector<int64_t> special, uint64_t seed) {
  check(ids.ndim() == 1 && (ids.flags() & py::array::c_style) != 0, "ids must be one contiguous row");
  check(lengths.ndim() == 1 && samples.ndim() == 1 && epochs.ndim() == 1, "lengths, samples, epochs must be 1-D");
  check(samples.size() == lengths.size() && epochs.size() == lengths.size(), "one sample and epoch per sequence");
  check(all_words(samples) && all_words(epochs), "samples and epochs must be 32-bit words");
  check(all_words(lengths), "lengths must not be negative");
  check(alignment >= 1, "alignment must be positive");
  check(rate >= 0 && rate <= 1 && shown >= 0 && shown <= 1, "rate and shown must lie in [0, 1]");
  int64_t total = 0, first = 0;
  for (const int64_t count : counts) {
    check(count >= 0 && count <= lengths.size() - first, "counts must sum to the number of sequences");
    const int64_t tokens = std::accumulate(lengths.data() + first, lengths.data() + first + count, int64_t{0});
    check(tokens <= std::numeric_limits<int32_t>::max(), "int32 cannot count the lengths of a micro-batch");
    total += tokens;
    first += count;
  }
  check(first == lengths.size(), "counts must sum to the number of sequences");
  check(total == ids.size(), "lengths must sum to the number of ids");
  const auto is_token = [&](int64_t id) { return id >= 0 && id < vocab_size; };
  special.erase(std::remove_if(special.begin(), special.end(), [&](int64_t id) { return !is_token(id); }),
                special.end());
  std::sort(special.begin(), special.end());
  special.erase(std::unique(special.begin(), special.end()), special.end());
  const maelm::Policy policy = policy_of(policy_name);
  check(policy == maelm::Policy::kMask || static_cast<int64_t>(special.size()) < vocab_size,
        "every token of the vocabulary is special");
  const maelm::MaskingOptions options{rate,       stochastic, special_tokens,     policy, shown,
                                      vocab_size, mask_id,    std::move(special), seed};
  const auto run = [&](auto function) {
    return function(ids, lengths, samples, epochs, counts, alignment, allocate, options);
  };
  if (py::isinstance<py::array_t<uint16_t>>(ids)) return run(pack_as<uint16_t>);
  if (py::isinstance<py::array_t<uint32_t>>(ids)) return run(pack_as<uint32_t>);
  if (py::isinstance<py::array_t<int32_t>>(ids)) return run(pack_as<int32_t>);
  if (py::isinstance<py::array_t<int64_t>>(ids)) return run(pack_as<int64_t>);
  throw std::invalid_argument("ids must be uint16, uint32, int32 or int64");
}

using PackingFunction = int64_t (*)(const int64_t*, int64_t, int64_t, int32_t*);

std::pair<Int32Array, int64_t> into_bins(PackingFunction function, const Int64Array& lengths, int64_t budget) {
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
    opened = function(lengths.data(), lengths.size(), budget, out);
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

// A token store's samples, with the arrays they are read from.
class StoreSamples {
 public:
  // record_batches: (tokens, offsets) of each.
  explicit StoreSamples(std::vector<std::pair<py::array, py::array_t<int32_t>>> record_batches)
      : arrays_(std::move(record_batches)) {
    check(!arrays_.empty(), "a store has at least one record batch");
    for (const auto& [tokens, offsets] : arrays_) {
      check(tokens.ndim() == 1 && (tokens.flags() & py::array::c_style) != 0 && offsets.ndim() == 1 &&
                (offsets.flags() & py::array::c_style) != 0 && offsets.size() >= 1,
            "tokens and offsets must be contiguous rows");
      check(tokens.dtype().equal(dtype()), "tokens must be of one type");
      samples_.add(tokens.data(), tokens.size(), offsets.data(), offsets.size() - 1);
    }
  }

  Int64Array lengths(const Int64Array& samples) const {
    check_range(samples);
    Int64Array lengths(samples.size());
    int64_t* out = lengths.mutable_data();
    int64_t wrong = -1;
    {
      py::gil_scoped_release released;
      wrong = samples_.lengths(samples.data(), samples.size(), out);
    }
    if (wrong >= 0) {
      throw std::domain_error("sample " + std::to_string(samples.data()[wrong]) + " has no valid offsets");
    }
    return lengths;
  }

  py::array read(const Int64Array& samples) const {
    const Int64Array each = lengths(samples);
    py::array tokens(dtype(), std::accumulate(each.data(), each.data() + each.size(), int64_t{0}));
    void* out = tokens.mutable_data();
    {
      py::gil_scoped_release released;
      samples_.read(samples.data(), samples.size(), out);
    }
    return tokens;
  }

 private:
  py::dtype dtype() const { return arrays_[0].first.dtype(); }

  void check_range(const Int64Array& samples) const {
    check(samples.ndim() == 1, "samples must be 1-D");
    for (py::ssize_t i = 0; i < samples.size(); ++i) {
      const int64_t sample = samples.data()[i];
      if (sample < 0 || sample >= samples_.count()) {
        throw py::index_error("sample " + std::to_string(sample) + " of " + std::to_string(samples_.count()));
      }
    }
  }

  std::vector<std::pair<py::array, py::array_t<int32_t>>> arrays_;
  maelm::Samples samples_{arrays_.empty() ? 0 : arrays_[0].first.itemsize()};
};

}  // namespace

PYBIND11_MODULE(_host, module) {
  using namespace pybind11::literals;
  module.doc() = "Host code of maelm_fast; called by maelm_fast.data, which checks the arguments.";
  module.def("pack", &pack, py::kw_only(), "ids"_a.noconvert(), "lengths"_a, "samples"_a, "epochs"_a,
             "counts"_a, "alignment"_a, "allocate"_a, "rate"_a, "stochastic"_a, "special_tokens"_a, "policy"_a,
             "shown"_a, "vocab_size"_a, "mask_id"_a, "special"_a, "seed"_a,
             "Micro-batches of counts[b] sequences each, written into the row that allocate(elements) returns, every "
             "tensor at a multiple of the alignment: (visible lengths, masked lengths) of the sequences of each.");
  for (const auto& [name, function] : {std::pair{"best_fit", &maelm::best_fit}, {"spread", &maelm::spread}}) {
    const auto bound = [function = function](const Int64Array& lengths, int64_t budget) {
      return into_bins(function, lengths, budget);
    };
    module.def(name, bound, "lengths"_a, "budget"_a, "(bin of each item, number of bins).");
  }
  py::class_<StoreSamples>(module, "Samples", "The samples of a token store.")
      .def(py::init<std::vector<std::pair<py::array, py::array_t<int32_t>>>>(), "record_batches"_a)
      .def("lengths", &StoreSamples::lengths, "samples"_a, "Tokens of each sample.")
      .def("read", &StoreSamples::read, "samples"_a, "The tokens of the samples, one after another.");
  module.def("permute", &permute, "index"_a, "size"_a, "half_bits"_a, "rounds"_a, "seed"_a, "epoch"_a,
             "The samples at these places of an epoch's order.");
  module.def("keep_freed_memory", &maelm::keep_freed_memory,
             "Keep large freed blocks in the process; False where the C library is not glibc.");
}
