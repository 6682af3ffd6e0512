// torch's view of a group: every `dist.*` call arrives here and goes on to the core.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "compat.hpp"
#include "process_group/operation.hpp"
#include "process_group/profiling.hpp"
#include "process_group/timeout_extensions.hpp"
#include "symm_mem/pool_allocator.hpp"
#include "work/device_work.hpp"
#include "work/work.hpp"

namespace symm {

// Tensors of an all-reduce that is added to a residual and normed. Undefined: a scale that is not given, scales that are not wanted.
struct NormTensors {
  const at::Tensor& input;
  const at::Tensor& residual;
  const at::Tensor& weight;
  at::Tensor scale;
  // Results; `normed` may be the input, `sum` the residual.
  const at::Tensor& normed;
  const at::Tensor& sum;
  at::Tensor scales;

  // Throws unless shapes and types fit each other.
  void check() const;
};

class ProcessGroupSymm : public ::c10d::Backend {
 public:
  struct Options final : ::c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : ::c10d::Backend::Options("symm", timeout) {}
    c10::intrusive_ptr<::c10d::Backend::Options> clone() const SYMM_OVERRIDE_CLONE {
      return c10::make_intrusive<Options>(*this);
    }

    // What connects nodes; empty: as the environment or the default group says.
    std::string inter_node_backend;
    // Type of sums between nodes, "tensor" or "float32"; empty: as the default group.
    std::string reduce_dtype;
    // Order of sums over ranks, "rank" or "tree"; empty: as the environment or the default group says.
    std::string order;
  };

  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  // Joins the group; returns once every member has, or throws within the options' timeout.
  ProcessGroupSymm(
      const c10::intrusive_ptr<::c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options);
  ~ProcessGroupSymm() override;

  const std::string getBackendName() const override {
    return "symm";
  }
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override;

  // The group that calls run in; dead once this has left.
  const Group& core() const {
    return group_;
  }

  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts)
      SYMM_OVERRIDE_GATHER_SINGLE;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ::c10d::ReduceScatterOptions& opts)
      override;
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
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  // The backend of the group that torch knows as `group_name`, for `device`. Refuses one that is not ours, in the name of `op`.
  static c10::intrusive_ptr<ProcessGroupSymm> named(const std::string& group_name, at::Device device, const char* op);
  // Reduces `input` into `output`, of the same type and shape, which is contiguous; `input` is only read.
  void all_reduce_into(const at::Tensor& output, const at::Tensor& input, const ::c10d::ReduceOp& op);
  // Sums, adds the residual and norms, in the group's order of calls.
  void all_reduce_add_rms_norm(const NormTensors& tensors, double eps);

  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  // Closes the block since startCoalescing(), if there is one, without its work: sends and receives that run go on, calls on CUDA tensors
  // that were not launched never are.
  void drop_coalesced();

  // Has nothing to do: every group counts from 0.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  // Adds to the timeouts of later calls, until the first of them has ended.
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) SYMM_OVERRIDE_TIMEOUTS;
  // Does nothing: work has no duration, as with Gloo.
  void enableCollectivesTiming() override;
  // Sets up the group's memory on a CUDA device now, not at the first call.
  void eagerConnectSingleDevice(at::Device device) override;
  // Symmetric memory: tensors that the other ranks' kernels load and store directly.
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    return symmetric_allocator();
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override {
    return pools_.allocate(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex index) override {
    return index >= 0 && sharing_device(at::Device(at::kCUDA, index)).has_value();
  }
  ::c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  bool supportsSplitting() const override {
    return true;
  }
  c10::intrusive_ptr<::c10d::Backend> split(
      const c10::intrusive_ptr<::c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<::c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<::c10d::Backend> merge(
      const c10::intrusive_ptr<::c10d::Store>& store,
      const c10::intrusive_ptr<::c10d::Backend::Options>& opts,
      const int& rank,
      const int& size) override;

 protected:
  // A group of the same kind, for `split` and `merge`.
  virtual c10::intrusive_ptr<ProcessGroupSymm> joined(
      const c10::intrusive_ptr<::c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options) const;
  // Adds `work` to the block that is being coalesced, if there is one.
  WorkPtr remember(WorkPtr work);

 private:
  // Runs a prepared operation inline, or queues it, seen by a profiler if there is one.
  WorkPtr launch(std::shared_ptr<Operation> operation, std::chrono::milliseconds timeout, bool async);
  // Enqueues an operation on CUDA tensors, or adds it to the block that is being coalesced.
  WorkPtr launch_on_device(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout, bool async);
  WorkPtr launch_on_device(const std::shared_ptr<Operation>& operation, const MessageSpec& transfer, const Caller& from);
  // Enqueues an operation in the caller's stream, where nobody needs a work for it: no profiler listens, nothing is coalesced, the host
  // does not wait. False if that is not so.
  bool launch_in_order(Operation& operation, std::chrono::milliseconds timeout);
  // The timeout of a call that states `timeout`, extended; not positive: the group's.
  std::chrono::milliseconds extended(std::chrono::milliseconds timeout);
  // The timeout of a call that states `timeout`, where that may be the group's.
  std::chrono::milliseconds stated(std::chrono::milliseconds timeout) const {
    return timeout.count() > 0 ? timeout : options_->timeout;
  }
  // Notes a work for the extensions of the timeout.
  void begin_extensions(const WorkPtr& work) {
    if (extensions_.any()) {
      extensions_.begin(work);
    }
  }
  // `what` is what DeviceWork::add takes.
  template <typename... What>
  WorkPtr launch_recorded(const std::shared_ptr<Operation>& operation, const Caller& from, const What&... what);
  // The group's on that device; mutex_ must be held.
  std::shared_ptr<DeviceStreams> streams_on(at::Device device);
  // Within the handler of a collective's exception: tells the ranks that wait for the call, and throws on.
  [[noreturn]] void refused() const;
  // Throws the refusal of a send or receive.
  [[noreturn]] void refused(int peer, int tag, bool send) const;
  // Device on which a barrier is to be waited for; none: the host.
  std::optional<at::Device> barrier_device(const ::c10d::BarrierOptions& opts) const;
  Caller caller(uint64_t sequence) const;
  WorkPtr transfer(std::shared_ptr<Operation> operation, const at::Tensor& tensor, int peer, int tag, bool send);
  // The group that an earlier `split` of this name made, if it can still be used.
  c10::intrusive_ptr<::c10d::Backend> living_child(const std::string& name);
  // Work of a call that is complete already.
  WorkPtr completed(std::shared_ptr<Operation> operation);
  WorkPtr sum_sparse(const at::Tensor& tensor, const ::c10d::AllreduceOptions& opts);
  std::vector<int64_t> even_lengths(const at::Tensor& piece) const;
  std::shared_ptr<Operation> allgather_operation(const Tensors& outputs, const Tensors& inputs) const;
  std::shared_ptr<Operation> reduce_scatter_operation(
      const Tensors& outputs,
      const Tensors& inputs,
      const ::c10d::ReduceOp& op) const;

  c10::intrusive_ptr<::c10d::Store> store_;
  c10::intrusive_ptr<Options> options_;
  Group group_;
  PoolRef pools_;
  // State since startCoalescing().
  struct Coalesced {
    std::vector<WorkPtr> parts;
    // Work of the CUDA calls so far: one of the parts.
    c10::intrusive_ptr<DeviceWork> gathering;
  };

  TimeoutExtensions extensions_;
  std::mutex mutex_;
  std::optional<Coalesced> coalesced_;
  std::map<c10::DeviceIndex, std::shared_ptr<DeviceStreams>> streams_;
  std::map<std::string, c10::weak_intrusive_ptr<ProcessGroupSymm>> children_;
  std::atomic<bool> closed_ = false;
};

// Joins a group of the core under the options' name, through `store` alone. It is one of those that `leave_all` leaves.
Group join_group(
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    const ProcessGroupSymm::Options& options,
    bool is_default);

// Leaves every group of this process, all within `limit`; calls that are not done by then fail. Peers are told that it was because of
// the error `farewell`, if that is not empty.
void leave_all(std::chrono::milliseconds limit, const std::string& farewell);

} // namespace symm
