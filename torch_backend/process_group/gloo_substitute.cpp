#include "process_group/gloo_substitute.hpp"

#include <algorithm>
#include <utility>

#include "errors.hpp"
#include "gil.hpp"

namespace symm {

using WorkPtr = ProcessGroupSymm::WorkPtr;

namespace {

// Returns true if Gloo accepts all these tensors in one call and symm, which takes one tensor, does
// not. Lists that Gloo would also reject go to symm, which reports the reason.
bool several(const ProcessGroupSymm::Tensors& tensors) {
  return tensors.size() > 1 &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
           return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
                  tensor.is_non_overlapping_and_dense() &&
                  tensor.scalar_type() == tensors.front().scalar_type() &&
                  tensor.sizes() == tensors.front().sizes();
         });
}

} // namespace

GlooSubstitute::GlooSubstitute(
    const c10::intrusive_ptr<::c10d::Store>& store,
    c10::intrusive_ptr<::c10d::Store> gloo_store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options,
    bool cuda)
    : ProcessGroupSymm(store, rank, size, std::move(options)),
      gloo_store_(std::move(gloo_store)),
      cuda_(cuda) {
  if (cuda) {
    gloo();
  }
}

GlooSubstitute::~GlooSubstitute() {
  GlooSubstitute::release_resources();
}

void GlooSubstitute::release_resources() {
  // Gloo joins its threads, which may need the GIL to release the tensors of the last call.
  without_gil([this] { gloo_.reset(); });
  ProcessGroupSymm::release_resources();
}

c10::intrusive_ptr<ProcessGroupSymm> GlooSubstitute::joined(
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options) const {
  return c10::make_intrusive<GlooSubstitute>(store, store, rank, size, std::move(options), cuda_);
}

BackendPtr GlooSubstitute::gloo() {
  std::lock_guard<std::mutex> lock(joining_);
  auto found = connected_gloo();
  if (!found) {
    const auto options = getBackendOptions();
    const auto given_up = [closed = closed_, group = core()] {
      return *closed || (*group)->error().kind != ErrorKind::None;
    };
    try {
      found = backend_factories().make(
          "gloo", options->group_name + "/gloo", meeting_store("gloo", gloo_store_, given_up),
          getRank(), getSize(), options->timeout, -1);
    } catch (...) {
      check((*core())->error());
      throw;
    }
    std::lock_guard<std::mutex> set(setting_);
    gloo_ = found;
  }
  return found;
}

BackendPtr GlooSubstitute::connected_gloo() {
  std::lock_guard<std::mutex> lock(setting_);
  return gloo_;
}

bool GlooSubstitute::elsewhere(const at::Tensor& tensor) const {
  return cuda_ && tensor.defined() && !tensor.is_cpu();
}

bool GlooSubstitute::elsewhere(const Tensors& tensors) const {
  return !tensors.empty() && elsewhere(tensors.front());
}

template <typename Call, typename Ours>
WorkPtr GlooSubstitute::served(bool by_gloo, Call&& call, Ours&& ours) {
  if (by_gloo) {
    return remember(call(*gloo()));
  }
  try {
    return ours();
  } catch (const c10::ValueError&) {
    throw CoreError(ErrorKind::Value, status_of(std::current_exception()));
  } catch (const c10::TypeError&) {
    throw CoreError(ErrorKind::Type, status_of(std::current_exception()));
  }
}

// Runs the call on Gloo if `by_gloo`, otherwise on symm.
#define SYMM_OR_GLOO(by_gloo, function, ...)                                 \
  return served(                                                             \
      by_gloo,                                                               \
      [&](::c10d::Backend& gloo) { return gloo.function(__VA_ARGS__); },     \
      [&] { return ProcessGroupSymm::function(__VA_ARGS__); })

WorkPtr GlooSubstitute::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  SYMM_OR_GLOO(elsewhere(tensors) || several(tensors), broadcast, tensors, opts);
}

WorkPtr GlooSubstitute::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  SYMM_OR_GLOO(elsewhere(tensors) || several(tensors), allreduce, tensors, opts);
}

WorkPtr GlooSubstitute::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  SYMM_OR_GLOO(elsewhere(tensors), allreduce_sparse, tensors, opts);
}

WorkPtr GlooSubstitute::allreduce_coalesced(
    Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  SYMM_OR_GLOO(elsewhere(tensors), allreduce_coalesced, tensors, opts);
}

WorkPtr GlooSubstitute::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  SYMM_OR_GLOO(elsewhere(tensors), reduce, tensors, opts);
}

WorkPtr GlooSubstitute::allgather(
    TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  SYMM_OR_GLOO(elsewhere(inputs) || several(inputs), allgather, outputs, inputs, opts);
}

WorkPtr GlooSubstitute::_allgather_base(
    at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  SYMM_OR_GLOO(elsewhere(input), _allgather_base, output, input, opts);
}

WorkPtr GlooSubstitute::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  SYMM_OR_GLOO(elsewhere(inputs), allgather_coalesced, outputs, inputs, opts);
}

WorkPtr GlooSubstitute::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const ::c10d::AllgatherOptions& opts) {
  SYMM_OR_GLOO(elsewhere(inputs), allgather_into_tensor_coalesced, outputs, inputs, opts);
}

WorkPtr GlooSubstitute::gather(
    TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) {
  SYMM_OR_GLOO(elsewhere(inputs), gather, outputs, inputs, opts);
}

WorkPtr GlooSubstitute::scatter(
    Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) {
  SYMM_OR_GLOO(elsewhere(outputs), scatter, outputs, inputs, opts);
}

WorkPtr GlooSubstitute::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const ::c10d::ReduceScatterOptions& opts) {
  SYMM_OR_GLOO(elsewhere(outputs), reduce_scatter, outputs, inputs, opts);
}

WorkPtr GlooSubstitute::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const ::c10d::ReduceScatterOptions& opts) {
  SYMM_OR_GLOO(elsewhere(input), _reduce_scatter_base, output, input, opts);
}

WorkPtr GlooSubstitute::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const ::c10d::ReduceScatterOptions& opts) {
  SYMM_OR_GLOO(elsewhere(inputs), reduce_scatter_tensor_coalesced, outputs, inputs, opts);
}

WorkPtr GlooSubstitute::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const ::c10d::AllToAllOptions& opts) {
  SYMM_OR_GLOO(elsewhere(input), alltoall_base, output, input, output_splits, input_splits, opts);
}

WorkPtr GlooSubstitute::alltoall(
    Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) {
  SYMM_OR_GLOO(elsewhere(inputs), alltoall, outputs, inputs, opts);
}

WorkPtr GlooSubstitute::send(Tensors& tensors, int destination, int tag) {
  SYMM_OR_GLOO(elsewhere(tensors), send, tensors, destination, tag);
}

WorkPtr GlooSubstitute::recv(Tensors& tensors, int source, int tag) {
  SYMM_OR_GLOO(elsewhere(tensors), recv, tensors, source, tag);
}

WorkPtr GlooSubstitute::recvAnysource(Tensors& tensors, int tag) {
  SYMM_OR_GLOO(elsewhere(tensors), recvAnysource, tensors, tag);
}

#undef SYMM_OR_GLOO

void GlooSubstitute::setTimeout(std::chrono::milliseconds timeout) {
  ProcessGroupSymm::setTimeout(timeout);
  if (const auto gloo = connected_gloo()) {
    gloo->setTimeout(timeout);
  }
}

void GlooSubstitute::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  ProcessGroupSymm::addEphemeralTimeout(timeout);
#if TORCH_VERSION_MINOR >= 14
  if (const auto gloo = connected_gloo()) {
    gloo->addEphemeralTimeout(timeout);
  }
#endif
}

void GlooSubstitute::abort() {
  ProcessGroupSymm::abort();
  if (const auto gloo = connected_gloo()) {
    gloo->abort();
  }
}

void GlooSubstitute::shutdown() {
  ProcessGroupSymm::shutdown();
  if (const auto gloo = connected_gloo()) {
    gloo->shutdown();
  }
}

} // namespace symm
