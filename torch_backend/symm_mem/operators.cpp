// torch.ops.symm_mem reductions on CPU tensors. Arguments and errors are as in torch's operators on
// CUDA tensors; any dtype that the group can add is supported, at any alignment.
#include "symm_mem/operators.hpp"

#include <ATen/MemoryOverlap.h>
#include <c10/util/safe_numerics.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <exception>
#include <optional>
#include <utility>

#include "process_group/arguments.hpp"
#include "process_group/operation.hpp"
#include "symm_mem/group_lookup.hpp"

namespace symm {

WindowPtr find_window(const at::Tensor& tensor, const std::string& group_name) {
  const auto found = ::c10d::symmetric_memory::rendezvous(tensor, group_name);
  if (!found) {
    return nullptr;
  }
  auto* const window = dynamic_cast<SymmetricWindow*>(found.get());
  TORCH_CHECK_NOT_IMPLEMENTED(
      window != nullptr, "symmetric memory of ", tensor.device(),
      " is another backend's, not SYMM's");
  return WindowPtr::reclaim_copy(window);
}

WindowPtr window_of(
    const at::Tensor& tensor, const std::string& group_name, const char* op, const char* what) {
  auto window = find_window(tensor, group_name);
  TORCH_CHECK(window, op, ": ", what, " must be allocated with empty_strided_p2p().");
  return window;
}

void reject_operator(const std::string& group_name, const std::string& reason) {
  if (const auto group = joined_group(group_name, c10::kCPU)) {
    (*group)->reject_operator(reason);
  }
}

void compare_operators(const std::string& group_name, const std::string& call) {
  const auto member = membership(group_name, c10::kCPU);
  check(without_gil([&] { return (*member.group)->compare_operators(call); }));
}

void refused(const std::string& group_name) {
  const auto reason = status_of(std::current_exception()).message;
  reject_operator(group_name, std::string(reason));
  throw;
}

int64_t times(const char* op, int64_t a, int64_t b) {
  int64_t product = 0;
  TORCH_CHECK_VALUE(
      !c10::mul_overflows(a, b, &product), op, ": ", a, " times ", b,
      " is more than a tensor can have");
  return product;
}

int32_t dtype_of(const at::Tensor& tensor) {
  return static_cast<int32_t>(tensor.scalar_type());
}

namespace {

void check_sum(const at::Tensor& input, const std::string& reduce_op, const char* op) {
  TORCH_CHECK(reduce_op == "sum", wrong_word(op, "reduce_op", reduce_op, {"sum"}));
  check(check_reduce(dtype_of(input), ::c10d::ReduceOp::SUM));
}

// Checks the output of an operator that keeps the shape of its input.
void check_output(const at::Tensor& input, const at::Tensor& output, const char* op) {
  check_writable(output, op);
  TORCH_CHECK(output.is_contiguous(), op, ": output must be contiguous.");
  TORCH_CHECK(
      output.sizes() == input.sizes(), op,
      ": input/output size mismatch, input.sizes(): ", input.sizes(),
      ", output.sizes(): ", output.sizes());
  TORCH_CHECK(
      output.scalar_type() == input.scalar_type(), op, ": the input is ", input.scalar_type(),
      ", the output ", output.scalar_type());
}

at::Tensor one_shot(
    const at::Tensor& input,
    const std::optional<at::Tensor>& local_input,
    const std::string& reduce_op,
    const std::string& group_name,
    const at::Tensor& out) {
  constexpr auto op = "one_shot_all_reduce";
  const auto window = check_arguments(group_name, [&]() -> WindowPtr {
    TORCH_CHECK(input.is_contiguous(), op, ": input must be contiguous.");
    check_output(input, out, op);
    check_sum(input, reduce_op, op);
    if (local_input) {
      TORCH_CHECK(local_input->is_contiguous(), op, ": local input must be contiguous.");
      TORCH_CHECK(
          local_input->numel() <= input.numel(), op,
          ": local input size must be smaller than symm buffer size.");
      TORCH_CHECK(
          local_input->scalar_type() == input.scalar_type(), op, ": the buffer is ",
          input.scalar_type(), ", the local input ", local_input->scalar_type());
    }
    if (input.numel() == 0) {
      // The ranks compare their calls nevertheless.
      return find_window(input, group_name);
    }
    // Peers read the input while this rank writes its output.
    at::assert_no_overlap(out, input);
    return window_of(input, group_name, op);
  });
  if (!window) {
    return out;
  }
  const auto local = local_input ? span_of(*local_input) : Span{0, 0};
  run_on(*window, [&](const WindowHandle& handle) {
    return handle.one_shot_all_reduce(dtype_of(input), span_of(input), local, span_of(out));
  });
  return out;
}

at::Tensor one_shot_all_reduce(
    const at::Tensor& input, std::string reduce_op, std::string group_name) {
  return one_shot(input, std::nullopt, reduce_op, group_name, at::empty_like(input));
}

at::Tensor one_shot_all_reduce_out(
    const at::Tensor& input, std::string reduce_op, std::string group_name, at::Tensor out) {
  return one_shot(input, std::nullopt, reduce_op, group_name, out);
}

at::Tensor one_shot_all_reduce_copy(
    const at::Tensor& symm_buffer,
    const at::Tensor& local_input,
    std::string reduce_op,
    std::string group_name) {
  return one_shot(symm_buffer, local_input, reduce_op, group_name, at::empty_like(local_input));
}

at::Tensor one_shot_all_reduce_copy_out(
    const at::Tensor& symm_buffer,
    const at::Tensor& local_input,
    std::string reduce_op,
    std::string group_name,
    at::Tensor out) {
  return one_shot(symm_buffer, local_input, reduce_op, group_name, out);
}

at::Tensor two_shot(
    const at::Tensor& input,
    const std::optional<at::Tensor>& output,
    const std::string& reduce_op,
    const std::string& group_name) {
  constexpr auto op = "two_shot_all_reduce";
  const auto window = check_arguments(group_name, [&]() -> WindowPtr {
    TORCH_CHECK(input.is_contiguous(), op, ": input must be contiguous.");
    check_sum(input, reduce_op, op);
    if (output) {
      check_output(input, *output, op);
      at::assert_no_overlap(*output, input);
    }
    return input.numel() == 0 ? find_window(input, group_name) : window_of(input, group_name, op);
  });
  const auto& result = output ? *output : input;
  if (!window) {
    return result;
  }
  run_on(*window, [&](const WindowHandle& handle) {
    return handle.two_shot_all_reduce(dtype_of(input), span_of(input), span_of(result));
  });
  return result;
}

at::Tensor two_shot_all_reduce_(at::Tensor input, std::string reduce_op, std::string group_name) {
  return two_shot(input, std::nullopt, reduce_op, group_name);
}

at::Tensor two_shot_all_reduce_out(
    at::Tensor input, std::string reduce_op, std::string group_name, at::Tensor output) {
  return two_shot(input, output, reduce_op, group_name);
}

at::Tensor reduce_scatter_out(
    at::Tensor input, std::string group_name, bool split_last_dim, at::Tensor output) {
  constexpr auto op = "reduce_scatter";
  const auto window = check_arguments(group_name, [&]() -> WindowPtr {
    TORCH_CHECK(input.is_contiguous(), op, ": input must be contiguous.");
    TORCH_CHECK(output.is_contiguous(), op, ": output must be contiguous.");
    check_writable(output, op);
    TORCH_CHECK(
        output.scalar_type() == input.scalar_type(), op, ": the input is ", input.scalar_type(),
        ", the output ", output.scalar_type());
    check_sum(input, "sum", op);
    auto window = window_of(input, group_name, op);
    const auto size = window->get_world_size();
    TORCH_CHECK(
        input.numel() % size == 0,
        "expected number of elements to be divisible by world_size * alignment, number of "
        "elements ",
        input.numel(), " world size ", size);
    if (split_last_dim) {
      TORCH_CHECK(
          input.dim() > 0 && input.dim() == output.dim() &&
              input.sizes().slice(0, input.dim() - 1) == output.sizes().slice(0, output.dim() - 1),
          "reduce_scatter expected input and output to have same sizes except in the last "
          "dimension");
      TORCH_CHECK(
          input.size(-1) % size == 0,
          "expected last dimension to be divisible by world_size * alignment, last dimension ",
          input.size(-1), " world size ", size);
      TORCH_CHECK(
          output.size(-1) == input.size(-1) / size,
          "reduce_scatter expected output last dim size to be input last dim size / world_size");
    } else {
      TORCH_CHECK(input.dim() == 1, "reduce_scatter expected 1D input");
      TORCH_CHECK(output.dim() == 1, "reduce_scatter expected 1D output");
      TORCH_CHECK(
          output.numel() == input.numel() / size, "reduce_scatter expected an output of ",
          input.numel() / size, " elements, got ", output.numel());
    }
    at::assert_no_overlap(output, input);
    return window;
  });
  // A tensor that is not split along its last dimension has only that one, so it is one row.
  const auto row = static_cast<size_t>(input.size(-1)) * input.element_size();
  run_on(*window, [&](const WindowHandle& handle) {
    return handle.reduce_scatter(
        dtype_of(input), ::c10d::ReduceOp::SUM, span_of(input), row, span_of(output));
  });
  return output;
}

} // namespace

void add_reductions(torch::Library& library) {
  add<one_shot_all_reduce>(library, "one_shot_all_reduce");
  add<one_shot_all_reduce_out>(library, "one_shot_all_reduce_out");
  add<one_shot_all_reduce_copy>(library, "one_shot_all_reduce_copy");
  add<one_shot_all_reduce_copy_out>(library, "one_shot_all_reduce_copy_out");
  add<two_shot_all_reduce_>(library, "two_shot_all_reduce_");
  add<two_shot_all_reduce_out>(library, "two_shot_all_reduce_out");
  add<reduce_scatter_out>(library, "reduce_scatter_out");
}

} // namespace symm
