// Collectives on single tensors. If one throws, `refused` notifies the ranks that wait for this
// one.
#include "process_group/process_group.hpp"

#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "errors.hpp"
#include "process_group/arguments.hpp"
#include "process_group/call_site.hpp"

namespace symm {

using ::c10d::OpType;

ProcessGroupSymm::WorkPtr ProcessGroupSymm::broadcast(
    Tensors& tensors, const ::c10d::BroadcastOptions& opts) try {
  const auto& tensor = single("broadcast", tensors);
  check_root("broadcast", opts.rootRank, opts.rootTensor, getSize());
  auto operation = std::make_shared<Operation>(OpType::BROADCAST, "symm:broadcast");
  operation->begin(Collective::Broadcast, tensor).root = static_cast<int32_t>(opts.rootRank);
  if (getRank() == opts.rootRank) {
    operation->add_input(tensor);
    operation->outputs.push_back(tensor);
  } else {
    operation->add_output(tensor);
    operation->note_input(tensor);
  }
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::allreduce(
    Tensors& tensors, const ::c10d::AllreduceOptions& opts) try {
  const auto& tensor = single("allreduce", tensors);
  if (tensor.is_sparse()) {
    return sum_sparse(tensor, opts);
  }
  auto operation = std::make_shared<Operation>(OpType::ALLREDUCE, "symm:all_reduce");
  operation->begin(Collective::AllReduce, tensor);
  operation->reduce_with(opts.reduceOp);
  operation->transform(tensor);
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::allreduce_coalesced(
    Tensors& tensors,
    const ::c10d::AllreduceCoalescedOptions& opts) try {
  TORCH_CHECK_VALUE(
      !tensors.empty(), "ProcessGroupSymm::allreduce_coalesced: requires non-empty tensor list");
  check_like("allreduce_coalesced", tensors, tensors.front(), false);
  auto operation = std::make_shared<Operation>(OpType::ALLREDUCE_COALESCED, "symm:all_reduce");
  for (const auto& tensor : tensors) {
    operation->begin(Collective::AllReduce, tensor);
    operation->reduce_with(opts.reduceOp);
    operation->transform(tensor);
  }
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::reduce(
    Tensors& tensors, const ::c10d::ReduceOptions& opts) try {
  const auto& tensor = single("reduce", tensors);
  check_root("reduce", opts.rootRank, opts.rootTensor, getSize());
  auto operation = std::make_shared<Operation>(OpType::REDUCE, "symm:reduce");
  operation->begin(Collective::Reduce, tensor).root = static_cast<int32_t>(opts.rootRank);
  operation->reduce_with(opts.reduceOp);
  if (getRank() == opts.rootRank) {
    operation->transform(tensor);
  } else {
    operation->add_input(tensor);
    operation->outputs.push_back(tensor);
  }
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

std::vector<int64_t> ProcessGroupSymm::even_lengths(const at::Tensor& piece) const {
  return std::vector<int64_t>(getSize(), piece.numel());
}

std::shared_ptr<Operation> ProcessGroupSymm::allgather_operation(
    const Tensors& outputs, const Tensors& inputs) const {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size() && !inputs.empty(),
      "ProcessGroupSymm::allgather: requires input/output tensor lists to have the same length, "
      "got ",
      inputs.size(), " inputs and ", outputs.size(), " outputs");
  auto operation = std::make_shared<Operation>(OpType::_ALLGATHER_BASE, "symm:all_gather");
  operation->parts = getSize();
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_parts("_allgather_base", "output", outputs[i], "input", inputs[i], getSize());
    operation->begin(Collective::AllGather, inputs[i]);
    operation->add_input(inputs[i]);
    operation->add_outputs(outputs[i], even_lengths(inputs[i]));
  }
  return operation;
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const ::c10d::AllgatherOptions& opts) try {
  return launch(allgather_operation({output}, {input}), opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const ::c10d::AllgatherOptions& opts) try {
  auto operation = allgather_operation(outputs, inputs);
  operation->coalesced = true;
  return launch(std::move(operation), opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::gather_single(
    at::Tensor& output,
    at::Tensor& input,
    const ::c10d::GatherOptions& opts) try {
  check_root("gather_single", opts.rootRank, 0, getSize());
  auto operation = std::make_shared<Operation>(OpType::GATHER, "symm:gather");
  operation->begin(Collective::Gather, input).root = static_cast<int32_t>(opts.rootRank);
  operation->add_input(input);
  if (getRank() == opts.rootRank) {
    check_parts("gather_single", "output", output, "input", input, getSize());
    operation->add_outputs(output, even_lengths(input));
  }
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

std::shared_ptr<Operation> ProcessGroupSymm::reduce_scatter_operation(
    const Tensors& outputs,
    const Tensors& inputs,
    const ::c10d::ReduceOp& op) const {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size() && !inputs.empty(),
      "ProcessGroupSymm::reduce_scatter: requires input/output tensor lists to have the same "
      "length, got ",
      inputs.size(), " inputs and ", outputs.size(), " outputs");
  auto operation = std::make_shared<Operation>(OpType::_REDUCE_SCATTER_BASE, "symm:reduce_scatter");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_parts("_reduce_scatter_base", "input", inputs[i], "output", outputs[i], getSize());
    operation->begin(Collective::ReduceScatter, inputs[i]);
    operation->reduce_with(op);
    operation->add_inputs(inputs[i], even_lengths(outputs[i]));
    operation->add_output(outputs[i]);
  }
  return operation;
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const ::c10d::ReduceScatterOptions& opts) try {
  return launch(
      reduce_scatter_operation({output}, {input}, opts.reduceOp), opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const ::c10d::ReduceScatterOptions& opts) try {
  return launch(
      reduce_scatter_operation(outputs, inputs, opts.reduceOp), opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const ::c10d::AllToAllOptions& opts) try {
  TORCH_CHECK_TYPE(
      output.scalar_type() == input.scalar_type(),
      "ProcessGroupSymm::alltoall_base: the input tensor is ", input.scalar_type(),
      ", the output tensor ", output.scalar_type(), "; both must have the same dtype");
  const auto sent = split_lengths("alltoall_base", "input", input, input_splits, getSize());
  const auto received = split_lengths("alltoall_base", "output", output, output_splits, getSize());
  auto operation = std::make_shared<Operation>(OpType::ALLTOALL_BASE, "symm:all_to_all");
  operation->input_splits = input_splits;
  operation->output_splits = output_splits;
  operation->begin(Collective::AllToAll, input);
  operation->add_inputs(input, sent);
  operation->add_outputs(output, received);
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

void ProcessGroupSymm::all_reduce_into(
    const at::Tensor& output, const at::Tensor& input, const ::c10d::ReduceOp& op) try {
  auto operation = std::make_shared<Operation>(OpType::ALLREDUCE, "symm:all_reduce");
  operation->begin(Collective::AllReduce, input);
  operation->reduce_with(op);
  operation->add_input(input);
  operation->add_output(output);
  launch(operation, ::c10d::kUnsetTimeout, false);
} catch (...) {
  refused();
}

void ProcessGroupSymm::all_reduce_add_rms_norm(const NormTensors& tensors, double eps) try {
  tensors.check();
  auto operation = std::make_shared<Operation>(OpType::ALLREDUCE, "symm:all_reduce_add_rms_norm");
  operation->begin(Collective::AllReduceAddRmsNorm, tensors.input).factor = eps;
  for (const auto* tensor : {&tensors.input, &tensors.residual, &tensors.weight, &tensors.scale}) {
    if (tensor->defined()) {
      operation->add_input(*tensor);
    }
  }
  for (const auto* tensor : {&tensors.normed, &tensors.sum, &tensors.scales}) {
    if (tensor->defined()) {
      operation->add_output(*tensor);
    }
  }
  launch(operation, ::c10d::kUnsetTimeout, false);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::barrier(const ::c10d::BarrierOptions& opts) try {
  auto operation = std::make_shared<Operation>(OpType::BARRIER, "symm:barrier");
  operation->begin(Collective::Barrier, {});
  operation->device = barrier_device(opts);
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

void ProcessGroupSymm::monitoredBarrier(
    const ::c10d::BarrierOptions& opts, bool wait_all_ranks) try {
  check((*group_)->monitored_barrier(opts.timeout.count(), wait_all_ranks, call_site()));
} catch (...) {
  refused();
}

} // namespace symm
