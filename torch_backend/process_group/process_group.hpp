// torch's view of a group: every `dist.*` call arrives here and is passed to the core.
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

// Tensors of an all-reduce with residual and norm. `scale` is undefined if the caller
// passed no scale, `scales` if the caller does not want them.
struct NormTensors {
  const at::Tensor& input;
  const at::Tensor& residual;
  const at::Tensor& weight;
  at::Tensor scale;
  // The results; `normed` may be the input, `sum` the residual.
  const at::Tensor& normed;
  const at::Tensor& sum;
  at::Tensor scales;

  // Throws unless the shapes and types match.
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

    // The inter-node backend; empty: the choice of the environment or of the default group.
    std::string inter_node_backend;
    // The type of sums between nodes, "tensor" or "float32"; empty: the choice of the default
    // group.
    std::string reduce_dtype;
    // The order of sums over ranks, "rank" or "tree"; empty: the choice of the environment or of
    // the default group.
    std::string order;
    // How many processors CUDA kernels may take, "default", "efficiency" or "zero"; empty: as the
    // environment or the default group says.
    std::string cta_policy;
    // Maximum number of blocks of a CUDA kernel; 0: as the environment or the default group says.
    int max_ctas = 0;
  };

  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  // Joins the group. Returns once every member has joined, or throws within the timeout of the
  // options.
  ProcessGroupSymm(
      const c10::intrusive_ptr<::c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options);
  ~ProcessGroupSymm() override;
  // Leaves the group. c10 calls this instead of the destructor while a parent's `children_` still
  // refers to this object.
  void release_resources() override;

  const std::string getBackendName() const override {
    return "symm";
  }
  // Returns a copy.
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override;
  const c10::intrusive_ptr<Options>& options() const {
    return options_;
  }

  // The core's group; it can no longer be used once this rank has left.
  const Group& core() const {
    return group_;
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
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts)
      SYMM_OVERRIDE_GATHER_SINGLE;
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
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  // Returns the backend for `device` of the group that torch knows as `group_name`. Throws an error
  // that names `op` if that backend is not symm, nor a wrapper of torch's around it.
  static c10::intrusive_ptr<ProcessGroupSymm> named(
      const std::string& group_name, at::Device device, const char* op);
  // Reduces `input` into the contiguous `output`, which has the same type and shape; `input` is
  // only read.
  void all_reduce_into(
      const at::Tensor& output, const at::Tensor& input, const ::c10d::ReduceOp& op);
  // Sums, adds the residual and normalizes, in the group's order of calls.
  void all_reduce_add_rms_norm(const NormTensors& tensors, double eps);

  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  // Closes the block that startCoalescing() opened, if any, without making its work. Its sends and
  // receives that have started continue; its calls on CUDA tensors that were not launched never
  // run.
  void drop_coalesced();

  // Does nothing, because every group counts from 0.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  // Adds to the timeouts of later calls, until the first of them has ended.
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) SYMM_OVERRIDE_TIMEOUTS;
  // Does nothing: works report no duration, as in Gloo.
  void enableCollectivesTiming() override;
  // Sets up the group's memory on a CUDA device now, instead of at the first call.
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
  // Makes a group of the same kind, for `split` and `merge`.
  virtual c10::intrusive_ptr<ProcessGroupSymm> joined(
      const c10::intrusive_ptr<::c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options) const;
  // Adds `work` to the open coalescing block, if there is one.
  WorkPtr remember(WorkPtr work);

  // True once abort() or shutdown() was called. Shared, because others may ask after this object.
  const std::shared_ptr<std::atomic<bool>> closed_ = std::make_shared<std::atomic<bool>>(false);

 private:
  // Runs a prepared operation on this thread, or queues it, and shows it to a profiler if one is
  // active.
  WorkPtr launch(
      std::shared_ptr<Operation> operation, std::chrono::milliseconds timeout, bool async);
  // Enqueues an operation on CUDA tensors, or adds it to the open coalescing block.
  WorkPtr launch_on_device(
      const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout, bool async);
  WorkPtr launch_on_device(
      const std::shared_ptr<Operation>& operation, const MessageSpec& transfer, const Caller& from);
  // Enqueues an operation on the caller's stream without a work. Returns false if a work is needed:
  // for a profiler, for a coalescing block, or because the host must wait.
  bool launch_in_order(Operation& operation, std::chrono::milliseconds timeout);
  // Returns the extended timeout of a call whose options have `timeout`. If `timeout` is not
  // positive, the call has the group's timeout.
  std::chrono::milliseconds extended(std::chrono::milliseconds timeout);
  // Returns `timeout` from a call's options, or the group's timeout if it is not positive.
  std::chrono::milliseconds stated(std::chrono::milliseconds timeout) const {
    return timeout.count() > 0 ? timeout : options_->timeout;
  }
  // Records a work for the extensions of the timeout.
  void begin_extensions(const WorkPtr& work) {
    if (extensions_.any()) {
      extensions_.begin(work);
    }
  }
  // `what` has the arguments of DeviceWork::add.
  template <typename... What>
  WorkPtr launch_recorded(
      const std::shared_ptr<Operation>& operation, const Caller& from, const What&... what);
  // Returns the group's streams on that device; mutex_ must be held.
  std::shared_ptr<DeviceStreams> streams_on(at::Device device);
  // Called in the handler of a collective's exception: notifies the ranks that wait for the call,
  // and rethrows.
  [[noreturn]] void refused() const;
  // Reports and throws the rejection of a send or receive.
  [[noreturn]] void refused(int peer, int tag, bool send) const;
  // Returns the device on which a barrier waits; nothing for the host.
  std::optional<at::Device> barrier_device(const ::c10d::BarrierOptions& opts) const;
  Caller caller(uint64_t sequence) const;
  WorkPtr transfer(
      std::shared_ptr<Operation> operation, const at::Tensor& tensor, int peer, int tag, bool send);
  // Returns the group that an earlier `split` of this name made, if it can still be used.
  c10::intrusive_ptr<::c10d::Backend> living_child(const std::string& name);
  WorkPtr sum_sparse(const at::Tensor& tensor, const ::c10d::AllreduceOptions& opts);
  std::vector<int64_t> even_lengths(const at::Tensor& piece) const;
  std::shared_ptr<Operation> allgather_operation(
      const Tensors& outputs, const Tensors& inputs) const;
  std::shared_ptr<Operation> reduce_scatter_operation(
      const Tensors& outputs,
      const Tensors& inputs,
      const ::c10d::ReduceOp& op) const;

  c10::intrusive_ptr<::c10d::Store> store_;
  c10::intrusive_ptr<Options> options_;
  Group group_;
  PoolRef pools_;
  // The block that startCoalescing() opened.
  struct Coalesced {
    std::vector<WorkPtr> parts;
    // The work of all CUDA calls of the block so far, which is one of its parts.
    c10::intrusive_ptr<DeviceWork> gathering;
  };

  TimeoutExtensions extensions_;
  std::mutex mutex_;
  std::optional<Coalesced> coalesced_;
  std::map<c10::DeviceIndex, std::shared_ptr<DeviceStreams>> streams_;
  std::map<std::string, c10::weak_intrusive_ptr<ProcessGroupSymm>> children_;
};

// Throws unless a group can be made with the words and numbers of the options.
// `inter_node_backend` is checked only when the group is made, because it may name a backend that
// torch knows by then.
void check_choices(const ProcessGroupSymm::Options& options);

// Joins a group of the core under the options' name, through `store` only. The group is among those
// that `leave_all` leaves.
Group join_group(
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    const ProcessGroupSymm::Options& options,
    bool is_default);

// Leaves every group of this process within `limit`; calls that have not ended by then fail. Peers
// get `farewell`, the error that makes this process leave, if it is not empty.
void leave_all(std::chrono::milliseconds limit, const std::string& farewell);

} // namespace symm
