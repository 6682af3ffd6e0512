// torch.ops.symm_mem operators on CPU tensors that move data or write signals, including the
// low-contention reductions.
#include <ATen/MemoryOverlap.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <limits>

#include "process_group/arguments.hpp"
#include "process_group/operation.hpp"
#include "symm_mem/operators.hpp"

namespace symm {

namespace {

std::vector<at::Tensor> get_remote_tensors(const at::Tensor& x, std::string group_name) {
  const auto window = check_arguments(group_name, [&] {
    auto found = find_window(x, group_name);
    TORCH_CHECK_VALUE(found, "Tensor is not allocated from Symmetric Memory");
    return found;
  });
  int64_t extent = x.numel() == 0 ? 0 : 1;
  for (int64_t dim = 0; extent > 0 && dim < x.dim(); ++dim) {
    extent += (x.size(dim) - 1) * x.stride(dim);
  }
  std::vector<at::Tensor> tensors;
  for (int rank = 0; rank < window->get_world_size(); ++rank) {
    // The result starts at the tensor's own offset in the peer's buffer, also for a view.
    const auto buffer = window->get_buffer(rank, {extent}, x.scalar_type(), x.storage_offset());
    tensors.push_back(buffer.as_strided(x.sizes(), x.strides()));
  }
  return tensors;
}

// Runs one collective of the group, for tensors that are not in symmetric memory.
void run_in_group(const std::string& group_name, Operation& operation) {
  const auto member = membership(group_name, c10::kCPU);
  const auto run = [&](auto calls) { return (*member.group)->run(calls, 0, operation.seen); };
  check(without_gil([&] { return operation.begin_with(run).status; }));
}

std::vector<int64_t> stacked(const at::Tensor& tensor, int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes.front() = rows;
  return sizes;
}

at::Tensor low_contention_all_gather(const at::Tensor& tensor, std::string group_name) {
  constexpr auto op = "_low_contention_all_gather";
  at::Tensor output;
  // Null if the function below has completed the call without a window.
  const auto window = check_arguments(group_name, [&]() -> WindowPtr {
    TORCH_CHECK(
        tensor.dim() > 0, op, ": a tensor without dimensions cannot be gathered along the first");
    const auto size = membership(group_name, c10::kCPU).size;
    output = tensor.new_empty(stacked(tensor, times(op, tensor.size(0), size)));
    auto found = tensor.is_contiguous() ? find_window(tensor, group_name) : nullptr;
    if (!found) {
      const auto input = tensor.contiguous();
      Operation operation(::c10d::OpType::_ALLGATHER_BASE, "symm:all_gather");
      operation.begin(Collective::AllGather, input);
      operation.add_input(input);
      operation.add_outputs(output, std::vector<int64_t>(size, input.numel()));
      run_in_group(group_name, operation);
    }
    return found;
  });
  if (!window) {
    return output;
  }
  run_on(*window, [&](const WindowHandle& handle) {
    return handle.all_gather(dtype_of(tensor), span_of(tensor), span_of(output));
  });
  return output;
}

at::Tensor low_contention_reduce_scatter(
    const at::Tensor& tensor, std::string reduce_op, std::string group_name) {
  constexpr auto op = "_low_contention_reduce_scatter";
  const auto code = reduce_op == "avg" ? ::c10d::ReduceOp::AVG : ::c10d::ReduceOp::SUM;
  at::Tensor output;
  // Null if the function below has completed the call without a window.
  const auto window = check_arguments(group_name, [&]() -> WindowPtr {
    TORCH_CHECK_VALUE(
        reduce_op == "sum" || reduce_op == "avg",
        wrong_word(op, "reduce_op", reduce_op, {"sum", "avg"}));
    check(check_reduce(static_cast<int32_t>(tensor.scalar_type()), code));
    const auto size = membership(group_name, c10::kCPU).size;
    TORCH_CHECK(
        tensor.dim() > 0 && tensor.size(0) % size == 0, op, ": the first dimension of ",
        tensor.sizes(), " cannot be divided among ", size, " ranks");
    output = tensor.new_empty(stacked(tensor, tensor.size(0) / size));
    auto found = tensor.is_contiguous() ? find_window(tensor, group_name) : nullptr;
    if (!found) {
      const auto input = tensor.contiguous();
      Operation operation(::c10d::OpType::_REDUCE_SCATTER_BASE, "symm:reduce_scatter");
      operation.begin(Collective::ReduceScatter, input).reduce_op = code;
      operation.add_inputs(input, std::vector<int64_t>(size, output.numel()));
      operation.add_output(output);
      run_in_group(group_name, operation);
    }
    return found;
  });
  if (!window) {
    return output;
  }
  run_on(*window, [&](const WindowHandle& handle) {
    return handle.reduce_scatter(
        dtype_of(tensor), code, span_of(tensor), tensor.nbytes(), span_of(output));
  });
  return output;
}

// Exchanges rows of the first dimension. `out_splits_offsets` receives how many rows came from each
// rank, and where each rank's rows start in `out`.
void all_to_all_vdev(
    const at::Tensor& input,
    at::Tensor out,
    const at::Tensor& in_splits,
    at::Tensor out_splits_offsets,
    std::string group_name) {
  constexpr auto op = "all_to_all_vdev";
  const auto [window, splits] = check_arguments(group_name, [&] {
    TORCH_CHECK(
        input.is_contiguous() && out.is_contiguous(), op, ": input and out must be contiguous.");
    TORCH_CHECK(input.dim() > 0 && out.dim() > 0, op, ": input and out must have rows.");
    TORCH_CHECK(
        input.scalar_type() == out.scalar_type(), op, ": the input is ", input.scalar_type(),
        ", out ", out.scalar_type());
    TORCH_CHECK(
        input.sizes().slice(1) == out.sizes().slice(1), op, ": rows of the input are ",
        input.sizes().slice(1), ", of out ", out.sizes().slice(1));
    auto window = window_of(input, group_name, op);
    auto splits = window_of(in_splits, group_name, op, "in_splits");
    const auto size = window->get_world_size();
    TORCH_CHECK(
        in_splits.scalar_type() == at::kLong && in_splits.is_contiguous() &&
            in_splits.numel() == size,
        op, ": in_splits must be ", size, " contiguous int64, one for each rank.");
    TORCH_CHECK(
        out_splits_offsets.scalar_type() == at::kLong && out_splits_offsets.is_contiguous() &&
            out_splits_offsets.sizes() == at::IntArrayRef({2, size}),
        op, ": out_splits_offsets must be contiguous int64 of shape [2, ", size, "].");
    check_writable(out, op);
    check_writable(out_splits_offsets, op);
    // Peers read the input and the splits while this rank writes.
    at::assert_no_overlap(out, input);
    at::assert_no_overlap(out_splits_offsets, in_splits);
    return std::pair(std::move(window), std::move(splits));
  });
  const auto row = c10::multiply_integers(input.sizes().slice(1)) * input.element_size();
  run_on(*window, [&](const WindowHandle& handle) {
    return handle.all_to_all_vdev(
        splits->handle(), dtype_of(input),
        {span_of(input), span_of(in_splits), span_of(out), span_of(out_splits_offsets)},
        {static_cast<size_t>(input.size(0)), static_cast<size_t>(out.size(0)),
         static_cast<size_t>(row)});
  });
}

void check_words(const at::Tensor& input, int64_t offset, int64_t val, const char* op) {
  TORCH_CHECK(
      input.dim() == 1 && input.is_contiguous() && input.scalar_type() == at::kUInt32,
      "symm_mem::", op, ": input must be a flat, contiguous uint32 tensor.");
  TORCH_CHECK(
      offset >= 0, "symm_mem::", op, ": offset must be greater than or equal to 0 (got ", offset,
      ")");
  TORCH_CHECK(
      val >= 0 && val <= std::numeric_limits<uint32_t>::max(), "symm_mem::", op,
      ": val must be in the range of [0, 4294967295] (uint32_t).");
}

at::Tensor memset32_(at::Tensor input, int64_t offset, int64_t val, int64_t count) {
  constexpr auto op = "memset32_";
  check_words(input, offset, val, op);
  TORCH_CHECK(count > 0, "symm_mem::", op, ": count must be a positive integer (got ", count, ")");
  TORCH_CHECK(
      count <= input.numel() && offset <= input.numel() - count, "symm_mem::", op,
      ": offset + count (", offset, " + ", count, ") exceeded the numel of the input (",
      input.numel(), ")");
  auto* const words = static_cast<uint32_t*>(input.data_ptr()) + offset;
  std::fill_n(words, count, static_cast<uint32_t>(val));
  return input;
}

at::Tensor stream_write_value32_(at::Tensor input, int64_t offset, int64_t val) {
  constexpr auto op = "stream_write_value32_";
  check_words(input, offset, val, op);
  TORCH_CHECK(
      offset < input.numel(), "symm_mem::", op, ": offset (", offset,
      ") exceeded the numel of the input (", input.numel(), ")");
  auto* const words = static_cast<uint32_t*>(input.data_ptr());
  check(store_release(reinterpret_cast<size_t>(words + offset), static_cast<uint32_t>(val)));
  return input;
}

[[noreturn]] void without_multicast(const char* op) {
  TORCH_CHECK(false, op, ": multicast support is required; memory of the node has none.");
}

at::Tensor multimem_all_reduce_(at::Tensor, std::string, std::string) {
  without_multicast("multimem_all_reduce_");
}

at::Tensor multimem_one_shot_all_reduce(const at::Tensor&, std::string, std::string) {
  without_multicast("multimem_one_shot_all_reduce");
}

at::Tensor multimem_one_shot_all_reduce_out(
    const at::Tensor&, std::string, std::string, at::Tensor) {
  without_multicast("multimem_one_shot_all_reduce_out");
}

at::Tensor multimem_one_shot_reduce_out(
    const at::Tensor&, std::string, int64_t, std::string, at::Tensor) {
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
