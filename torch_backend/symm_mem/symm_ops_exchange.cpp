// torch.ops.symm_mem on CPU tensors that move data or write signals; reductions of the low-contention kind stand here with their like.
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>

#include "errors.hpp"
#include "gil.hpp"
#include "process_group/operation.hpp"
#include "symm_mem/symm_ops.hpp"

namespace symm {

namespace {

std::vector<at::Tensor> get_remote_tensors(const at::Tensor& x, std::string group_name) {
  const auto window = check_arguments(group_name, [&] {
    auto found = find_window(x, group_name);
    TORCH_CHECK_VALUE(found, "Tensor is not allocated from Symmetric Memory");
    return found;
  });
  std::vector<at::Tensor> tensors;
  for (int rank = 0; rank < window->get_world_size(); ++rank) {
    // Where the tensor is its own, in the peer's buffer: also for a view.
    tensors.push_back(window->get_buffer(rank, x.sizes(), x.scalar_type(), x.storage_offset()));
  }
  return tensors;
}

// One collective of the group, for tensors that are not in symmetric memory.
void run_in_group(const std::string& group_name, const Operation& operation) {
  const auto member = membership(group_name, c10::kCPU);
  const rust::Slice<const CallSpec> calls(operation.calls.data(), operation.calls.size());
  check(without_gil([&] { return (*member.group)->run(calls, 0); }));
}

std::vector<int64_t> stacked(const at::Tensor& tensor, int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes.front() = rows;
  return sizes;
}

at::Tensor low_contention_all_gather(const at::Tensor& tensor, std::string group_name) {
  constexpr auto op = "_low_contention_all_gather";
  at::Tensor output;
  // None: the call is complete.
  const auto window = check_arguments(group_name, [&]() -> WindowPtr {
    TORCH_CHECK(tensor.dim() > 0, op, ": a tensor without dimensions cannot be gathered along the first");
    const auto size = membership(group_name, c10::kCPU).size;
    output = tensor.new_empty(stacked(tensor, times(op, tensor.size(0), size)));
    auto found = tensor.is_contiguous() ? find_window(tensor, group_name) : nullptr;
    if (tensor.numel() == 0) {
      return nullptr;
    }
    if (!found) {
      const auto input = tensor.contiguous();
      Operation operation(::c10d::OpType::_ALLGATHER_BASE, "symm:all_gather");
      operation.begin(Collective::AllGather, input);
      operation.give(input);
      operation.take_pieces(output, std::vector<int64_t>(size, input.numel()));
      run_in_group(group_name, operation);
    }
    return found;
  });
  if (!window) {
    return output;
  }
  together(*window, [&] {
    const auto size = window->get_world_size();
    auto* const to = static_cast<std::byte*>(output.data_ptr());
    for (int step = 0; step < size; ++step) {
      const auto from = (window->get_rank() + step) % size;
      std::memcpy(to + from * tensor.nbytes(), window->at(from, offset_of(tensor)), tensor.nbytes());
    }
  });
  return output;
}

at::Tensor low_contention_reduce_scatter(const at::Tensor& tensor, std::string reduce_op, std::string group_name) {
  constexpr auto op = "_low_contention_reduce_scatter";
  const auto code = reduce_op == "avg" ? ::c10d::ReduceOp::AVG : ::c10d::ReduceOp::SUM;
  at::Tensor output;
  // None: the call is complete.
  const auto window = check_arguments(group_name, [&]() -> WindowPtr {
    TORCH_CHECK_VALUE(reduce_op == "sum" || reduce_op == "avg", "reduce_op (", reduce_op, ") is not supported");
    check(check_reduce(static_cast<int32_t>(tensor.scalar_type()), code));
    const auto size = membership(group_name, c10::kCPU).size;
    TORCH_CHECK(
        tensor.dim() > 0 && tensor.size(0) % size == 0, op, ": the first dimension of ", tensor.sizes(),
        " cannot be divided among ", size, " ranks");
    output = tensor.new_empty(stacked(tensor, tensor.size(0) / size));
    auto found = tensor.is_contiguous() ? find_window(tensor, group_name) : nullptr;
    if (tensor.numel() == 0) {
      return nullptr;
    }
    if (!found) {
      const auto input = tensor.contiguous();
      Operation operation(::c10d::OpType::_REDUCE_SCATTER_BASE, "symm:reduce_scatter");
      operation.begin(Collective::ReduceScatter, input).reduce_op = code;
      operation.give_pieces(input, std::vector<int64_t>(size, output.numel()));
      operation.take(output);
      run_in_group(group_name, operation);
    }
    return found;
  });
  if (!window) {
    return output;
  }
  together(*window, [&] {
    const auto offset = offset_of(tensor) + output.nbytes() * window->get_rank();
    window->reduce(tensor.scalar_type(), code, offset, output.nbytes(), output.data_ptr());
  });
  return output;
}

// How many rows each rank sends each other: `of(from, to)`.
class Splits {
 public:
  // What all ranks say in `in_splits`. Read once: what a peer writes there later changes nothing.
  Splits(const SymmetricWindow& window, size_t offset, int size) : size_(size) {
    for (int from = 0; from < size; ++from) {
      const auto* const splits_of_sender = reinterpret_cast<const int64_t*>(window.at(from, offset));
      all_.insert(all_.end(), splits_of_sender, splits_of_sender + size);
    }
  }

  int64_t of(int from, int to) const {
    return all_[static_cast<size_t>(from) * size_ + to];
  }

  // Refuses, alike on all ranks, what leaves the `rows` rows of a rank's input.
  void check(const char* op, int64_t rows) const {
    for (int from = 0; from < size_; ++from) {
      int64_t begin = 0;
      for (int to = 0; to < size_; ++to) {
        const auto count = of(from, to);
        TORCH_CHECK_VALUE(
            count >= 0 && count <= rows - begin, op, ": rank ", from, " sends rank ", to, " ", count, " rows from row ", begin,
            " on, of ", rows);
        begin += count;
      }
    }
  }

  // The first row for `to` in the input of `from`.
  int64_t begin(int from, int to) const {
    const auto row = all_.begin() + static_cast<ptrdiff_t>(from) * size_;
    return std::accumulate(row, row + to, int64_t{0});
  }

 private:
  const int size_;
  std::vector<int64_t> all_;
};

// Rows of the first dimension. `out_splits_offsets` receives how many rows came from each rank, and where each rank's begin in `out`.
void all_to_all_vdev(
    const at::Tensor& input,
    at::Tensor out,
    const at::Tensor& in_splits,
    at::Tensor out_splits_offsets,
    std::string group_name) {
  constexpr auto op = "all_to_all_vdev";
  const auto [window, splits] = check_arguments(group_name, [&] {
    TORCH_CHECK(input.is_contiguous() && out.is_contiguous(), op, ": input and out must be contiguous.");
    TORCH_CHECK(input.dim() > 0 && out.dim() > 0, op, ": input and out must have rows.");
    TORCH_CHECK(
        input.scalar_type() == out.scalar_type(), op, ": the input is ", input.scalar_type(), ", out ", out.scalar_type());
    TORCH_CHECK(
        input.sizes().slice(1) == out.sizes().slice(1), op, ": rows of the input are ", input.sizes().slice(1), ", of out ",
        out.sizes().slice(1));
    auto window = window_of(input, group_name, op);
    auto splits = window_of(in_splits, group_name, op, "in_splits");
    const auto size = window->get_world_size();
    TORCH_CHECK(
        in_splits.scalar_type() == at::kLong && in_splits.is_contiguous() && in_splits.numel() == size, op, ": in_splits must be ",
        size, " contiguous int64, one for each rank.");
    TORCH_CHECK(
        out_splits_offsets.scalar_type() == at::kLong && out_splits_offsets.is_contiguous() &&
            out_splits_offsets.sizes() == at::IntArrayRef({2, size}),
        op, ": out_splits_offsets must be contiguous int64 of shape [2, ", size, "].");
    return std::pair(std::move(window), std::move(splits));
  });
  const auto size = window->get_world_size();
  const auto rank = window->get_rank();
  const auto row = input.numel() == 0 ? 0 : static_cast<int64_t>(input.nbytes()) / input.size(0);
  together(*window, [&] {
    auto* const rows = out_splits_offsets.mutable_data_ptr<int64_t>();
    auto* const begins = rows + size;
    auto* const to = static_cast<std::byte*>(out.data_ptr());
    // What peers say is checked like any input: here it says where this rank reads and writes. Before anything is written.
    const Splits splits_of_sender(*splits, offset_of(in_splits), size);
    splits_of_sender.check(op, input.size(0));
    int64_t begin = 0;
    for (int from = 0; from < size; ++from) {
      const auto count = splits_of_sender.of(from, rank);
      TORCH_CHECK_VALUE(
          count <= out.size(0) - begin, op, ": rank ", rank, " receives ", begin, " rows from the ranks before rank ", from, " and ",
          count, " from it, out has ", out.size(0));
      rows[from] = count;
      begins[from] = begin;
      begin += count;
    }
    for (int from = 0; from < size; ++from) {
      const auto skipped = splits_of_sender.begin(from, rank);
      std::memcpy(to + begins[from] * row, window->at(from, offset_of(input) + skipped * row), rows[from] * row);
    }
  });
}

void check_words(const at::Tensor& input, int64_t offset, int64_t val, const char* op) {
  TORCH_CHECK(
      input.dim() == 1 && input.is_contiguous() && input.scalar_type() == at::kUInt32, "symm_mem::", op,
      ": input must be a flat, contiguous uint32 tensor.");
  TORCH_CHECK(offset >= 0, "symm_mem::", op, ": offset must be greater than or equal to 0 (got ", offset, ")");
  TORCH_CHECK(
      val >= 0 && val <= std::numeric_limits<uint32_t>::max(), "symm_mem::", op,
      ": val must be in the range of [0, 4294967295] (uint32_t).");
}

at::Tensor memset32_(at::Tensor input, int64_t offset, int64_t val, int64_t count) {
  constexpr auto op = "memset32_";
  check_words(input, offset, val, op);
  TORCH_CHECK(count > 0, "symm_mem::", op, ": count must be a positive integer (got ", count, ")");
  TORCH_CHECK(
      count <= input.numel() && offset <= input.numel() - count, "symm_mem::", op, ": offset + count (", offset, " + ", count,
      ") exceeded the numel of the input (", input.numel(), ")");
  auto* const words = static_cast<uint32_t*>(input.data_ptr()) + offset;
  std::fill_n(words, count, static_cast<uint32_t>(val));
  return input;
}

at::Tensor stream_write_value32_(at::Tensor input, int64_t offset, int64_t val) {
  constexpr auto op = "stream_write_value32_";
  check_words(input, offset, val, op);
  TORCH_CHECK(
      offset < input.numel(), "symm_mem::", op, ": offset (", offset, ") exceeded the numel of the input (", input.numel(), ")");
  auto* const words = static_cast<uint32_t*>(input.data_ptr());
  // Releases what this thread wrote before: a peer may wait for the value.
  std::atomic_ref<uint32_t>(words[offset]).store(static_cast<uint32_t>(val), std::memory_order_release);
  return input;
}

[[noreturn]] void without_multicast(const char* op) {
  TORCH_CHECK(false, op, ": multicast support is required; memory of the host has none.");
}

at::Tensor multimem_all_reduce_(at::Tensor, std::string, std::string) {
  without_multicast("multimem_all_reduce_");
}

at::Tensor multimem_one_shot_all_reduce(const at::Tensor&, std::string, std::string) {
  without_multicast("multimem_one_shot_all_reduce");
}

at::Tensor multimem_one_shot_all_reduce_out(const at::Tensor&, std::string, std::string, at::Tensor) {
  without_multicast("multimem_one_shot_all_reduce_out");
}

at::Tensor multimem_one_shot_reduce_out(const at::Tensor&, std::string, int64_t, std::string, at::Tensor) {
  without_multicast("multimem_one_shot_reduce_out");
}

at::Tensor multimem_all_gather_out(const at::Tensor&, std::string, at::Tensor) {
  without_multicast("multimem_all_gather_out");
}

} // namespace

void add_exchanges(torch::Library& library) {
  add<get_remote_tensors>(library, "get_remote_tensors");
  add<low_contention_all_gather>(library, "_low_contention_all_gather");
  add<low_contention_reduce_scatter>(library, "_low_contention_reduce_scatter");
  add<all_to_all_vdev>(library, "all_to_all_vdev");
  add<memset32_>(library, "memset32_");
  add<stream_write_value32_>(library, "stream_write_value32_");
  add<multimem_all_reduce_>(library, "multimem_all_reduce_");
  add<multimem_one_shot_all_reduce>(library, "multimem_one_shot_all_reduce");
  add<multimem_one_shot_all_reduce_out>(library, "multimem_one_shot_all_reduce_out");
  add<multimem_one_shot_reduce_out>(library, "multimem_one_shot_reduce_out");
  add<multimem_all_gather_out>(library, "multimem_all_gather_out");
}

} // namespace symm
