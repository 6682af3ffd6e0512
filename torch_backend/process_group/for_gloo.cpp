#include "process_group/for_gloo.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "hosts/backend_rail.hpp"

namespace symm {

using WorkPtr = ProcessGroupSymm::WorkPtr;

namespace {

// The tensor by whose device a call is told; undefined: none.
at::Tensor first(const ProcessGroupSymm::Tensors& tensors) {
  return tensors.empty() ? at::Tensor() : tensors.front();
}

} // namespace

SymmForGloo::SymmForGloo(
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options,
    bool cuda)
    : ProcessGroupSymm(store, rank, size, options) {
  if (cuda) {
    const auto beside = c10::make_intrusive<::c10d::PrefixStore>("gloo", store);
    gloo_ = made_backend(options->group_name, "cuda", beside, rank, size, options->timeout);
  }
}

c10::intrusive_ptr<ProcessGroupSymm> SymmForGloo::joined(
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options) const {
  return c10::make_intrusive<SymmForGloo>(store, rank, size, std::move(options), gloo_ != nullptr);
}

template <typename Call, typename Ours>
WorkPtr SymmForGloo::by_device(const at::Tensor& tensor, Call&& call, Ours&& ours) {
  if (gloo_ && tensor.defined() && !tensor.is_cpu()) {
    return remember(call(*gloo_));
  }
  return ours();
}

// The tensor that tells the device, and the call with its arguments.
#define SYMM_BY_DEVICE(tensor, function, ...)                                \
  return by_device(                                                          \
      tensor,                                                                \
      [&](::c10d::Backend& gloo) { return gloo.function(__VA_ARGS__); },     \
      [&] { return ProcessGroupSymm::function(__VA_ARGS__); })

WorkPtr SymmForGloo::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  SYMM_BY_DEVICE(first(tensors), broadcast, tensors, opts);
}

WorkPtr SymmForGloo::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  SYMM_BY_DEVICE(first(tensors), allreduce, tensors, opts);
}

WorkPtr SymmForGloo::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  SYMM_BY_DEVICE(first(tensors), allreduce_sparse, tensors, opts);
}

WorkPtr SymmForGloo::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  SYMM_BY_DEVICE(first(tensors), allreduce_coalesced, tensors, opts);
}

WorkPtr SymmForGloo::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  SYMM_BY_DEVICE(first(tensors), reduce, tensors, opts);
}

WorkPtr SymmForGloo::allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  SYMM_BY_DEVICE(first(inputs), allgather, outputs, inputs, opts);
}

WorkPtr SymmForGloo::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  SYMM_BY_DEVICE(input, _allgather_base, output, input, opts);
}

WorkPtr SymmForGloo::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  SYMM_BY_DEVICE(first(inputs), allgather_coalesced, outputs, inputs, opts);
}

WorkPtr SymmForGloo::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const ::c10d::AllgatherOptions& opts) {
  SYMM_BY_DEVICE(first(inputs), allgather_into_tensor_coalesced, outputs, inputs, opts);
}

WorkPtr SymmForGloo::gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) {
  SYMM_BY_DEVICE(first(inputs), gather, outputs, inputs, opts);
}

WorkPtr SymmForGloo::scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) {
  SYMM_BY_DEVICE(first(outputs), scatter, outputs, inputs, opts);
}

WorkPtr SymmForGloo::reduce_scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ReduceScatterOptions& opts) {
  SYMM_BY_DEVICE(first(outputs), reduce_scatter, outputs, inputs, opts);
}

WorkPtr SymmForGloo::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const ::c10d::ReduceScatterOptions& opts) {
  SYMM_BY_DEVICE(input, _reduce_scatter_base, output, input, opts);
}

WorkPtr SymmForGloo::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const ::c10d::ReduceScatterOptions& opts) {
  SYMM_BY_DEVICE(first(inputs), reduce_scatter_tensor_coalesced, outputs, inputs, opts);
}

WorkPtr SymmForGloo::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const ::c10d::AllToAllOptions& opts) {
  SYMM_BY_DEVICE(input, alltoall_base, output, input, output_splits, input_splits, opts);
}

WorkPtr SymmForGloo::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) {
  SYMM_BY_DEVICE(first(inputs), alltoall, outputs, inputs, opts);
}

WorkPtr SymmForGloo::send(Tensors& tensors, int destination, int tag) {
  SYMM_BY_DEVICE(first(tensors), send, tensors, destination, tag);
}

WorkPtr SymmForGloo::recv(Tensors& tensors, int source, int tag) {
  SYMM_BY_DEVICE(first(tensors), recv, tensors, source, tag);
}

WorkPtr SymmForGloo::recvAnysource(Tensors& tensors, int tag) {
  SYMM_BY_DEVICE(first(tensors), recvAnysource, tensors, tag);
}

#undef SYMM_BY_DEVICE

void SymmForGloo::setTimeout(std::chrono::milliseconds timeout) {
  ProcessGroupSymm::setTimeout(timeout);
  if (gloo_) {
    gloo_->setTimeout(timeout);
  }
}

void SymmForGloo::abort() {
  ProcessGroupSymm::abort();
  if (gloo_) {
    gloo_->abort();
  }
}

void SymmForGloo::shutdown() {
  ProcessGroupSymm::shutdown();
  if (gloo_) {
    gloo_->shutdown();
  }
}

} // namespace symm
