// A group of symm in the place of a Gloo group.
#pragma once

#include "internode/backend_factory.hpp"
#include "process_group/process_group.hpp"

namespace symm {

// Serves CPU tensors like any group of symm, and is named "gloo". A second backend, of Gloo, gets
// CUDA tensors if a rank can have any, and the calls on CPU tensors that symm rejects and Gloo
// accepts.
class GlooSubstitute final : public ProcessGroupSymm {
 public:
  // Joins like a group of symm. If `cuda`, which is the same on all ranks, is true, this also joins
  // a Gloo backend. Gloo meets in `gloo_store` and leaves keys in it, so no other group may use it.
  GlooSubstitute(
      const c10::intrusive_ptr<::c10d::Store>& store,
      c10::intrusive_ptr<::c10d::Store> gloo_store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options,
      bool cuda);
  ~GlooSubstitute() override;
  void release_resources() override;

  const std::string getBackendName() const override {
    return "gloo";
  }

  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr allgather(
      TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(
      TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  WorkPtr scatter(
      Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const ::c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) SYMM_OVERRIDE_TIMEOUTS;
  // Does nothing: neither symm on CPU tensors nor Gloo sets up a device.
  void eagerConnectSingleDevice(at::Device) override {}
  // Gloo does not have its own memory.
  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return false;
  }
  void abort() override;
  void shutdown() override;

 protected:
  c10::intrusive_ptr<ProcessGroupSymm> joined(
      const c10::intrusive_ptr<::c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options) const override;

 private:
  // Runs `call` on Gloo if `by_gloo` is true, otherwise runs `ours`, and returns the work. Turns a
  // ValueError or TypeError of `ours` into a RuntimeError, which Gloo raises for bad arguments.
  template <typename Call, typename Ours>
  WorkPtr served(bool by_gloo, Call&& call, Ours&& ours);
  // Returns true if the tensor that determines a call's device belongs to Gloo.
  bool elsewhere(const at::Tensor& tensor) const;
  bool elsewhere(const Tensors& tensors) const;
  // Returns Gloo's group, and joins it on the first such call, which all ranks make together. The
  // join ends with an error once this group has ended or failed.
  BackendPtr gloo();
  // Returns Gloo's group if it has been joined.
  BackendPtr connected_gloo();

  const c10::intrusive_ptr<::c10d::Store> gloo_store_;
  // True if a rank can have a GPU.
  const bool cuda_;
  // Held by the thread that joins. A thread that ends the group does not wait for it.
  std::mutex joining_;
  // Guards gloo_.
  std::mutex setting_;
  BackendPtr gloo_;
};

} // namespace symm
