// Calls on CUDA tensors: into the core, and back into stream order.
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "errors.hpp"
#include "process_group/process_group.hpp"
#include "work/device_work.hpp"

namespace symm {

namespace {

// Enqueues the operation's copies on `stream`, the current stream, after the present work on the
// group's own stream `own`, where earlier calls of this kind run.
void copy_in_order(
    DeviceStreams& streams, SideStream own, Operation& operation, const c10::Stream& stream) {
  if (operation.copies()) {
    streams.wait_for_own(own, stream);
    operation.copy_in();
  }
}

} // namespace

void DeviceWork::launch() {
  std::lock_guard<std::mutex> lock(mutex_);
  launch_batch();
}

void DeviceWork::launch_batch() {
  if (phase_ != Phase::Batching) {
    return;
  }
  try {
    const c10::DeviceGuard guard(device());
    origin_ = streams_->current();
    stream_ = background_ ? streams_->own_after(own_stream(), *origin_) : *origin_;
    bool several = false;
    for (const auto& maker : makers_) {
      if (maker != *origin_) {
        streams_->order(maker, *stream_);
        several = true;
      }
    }
    enqueue();
    if (several) {
      // The memory of a copy returns to the stream on which its call was made.
      keep_tensors();
    }
    if (background_) {
      // Copies into results that are not contiguous must precede the event at the end, too.
      const c10::StreamGuard beside(*stream_);
      for (const auto& operation : operations_) {
        operation->write_back();
      }
      end();
      recorded_ = streams_->records_graph(*stream_);
    } else {
      for (const auto& operation : operations_) {
        operation->write_back();
      }
      // The inputs can be released now, because their memory returns to this stream.
      release_inputs();
    }
    phase_ = Phase::Launched;
  } catch (...) {
    phase_ = Phase::Refused;
    failure_ = std::current_exception();
  }
  completed_ = true;
  if (recordFunctionEndCallback_) {
    recordFunctionEndCallback_();
    recordFunctionEndCallback_ = nullptr;
  }
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

SideStream DeviceWork::own_stream() const {
  const auto sends = [](const MessageSpec& transfer) { return transfer.send; };
  if (transfers_.size() < operations_.size()) {
    return SideStream::Calls;
  }
  if (std::all_of(transfers_.begin(), transfers_.end(), sends)) {
    return SideStream::Sends;
  }
  return std::none_of(transfers_.begin(), transfers_.end(), sends) ? SideStream::Receives
                                                                   : SideStream::Calls;
}

void DeviceWork::enqueue() const {
  const auto index = static_cast<int32_t>(device().index());
  const auto handle = streams_->handle(*stream_);
  const auto limit = timeout_.value_or(::c10d::kUnsetTimeout).count();
  // In a multi-node group, torch's backends and torch's allocator use the current stream.
  c10::OptionalStreamGuard beside;
  if (background_) {
    beside.reset_stream(*stream_);
  }
  CallSpecs calls;
  for (const auto& operation : operations_) {
    copy_in_order(*streams_, own_stream(), *operation, *stream_);
    operation->add_specs(calls);
  }
  if (!calls.empty()) {
    check((*group_)->launch({calls.data(), calls.size()}, index, handle, background_, limit));
  }
  if (!transfers_.empty()) {
    const rust::Slice<const MessageSpec> transfers(transfers_.data(), transfers_.size());
    check((*group_)->launch_transfers(transfers, index, handle, background_, limit));
  }
}

c10::Event& DeviceWork::end() const {
  if (!end_) {
    const c10::DeviceGuard guard(device());
    auto event = streams_->take_event();
    event.record(*stream_);
    end_ = std::move(event);
  }
  return *end_;
}

DeviceWork::Progress DeviceWork::progress() const {
  switch (phase_) {
    case Phase::Batching:
      return Progress::Running;
    case Phase::Refused:
    case Phase::Done:
      return Progress::Done;
    case Phase::Launched:
      break;
  }
  if (recorded_ || (!background_ && streams_->records_graph(*stream_))) {
    return Progress::Recorded;
  }
  if (streams_->records_graph(streams_->current()) ||
      (background_ && streams_->records_graph(*stream_))) {
    return Progress::Unknown;
  }
  const c10::DeviceGuard guard(device());
  if (!end().query()) {
    return Progress::Running;
  }
  // The kernel has ended, but it may have ended because it timed out.
  if (!failure()) {
    phase_ = Phase::Done;
  }
  return Progress::Done;
}

std::exception_ptr DeviceWork::failure() const {
  if (!failure_ && phase_ == Phase::Launched) {
    failure_ = exception_of((*group_)->failure());
  }
  return failure_;
}

void DeviceWork::keep_tensors() const {
  for (const auto& operation : operations_) {
    operation->for_each_tensor(
        [this](const at::Tensor& tensor) { streams_->keep(tensor, *stream_); });
  }
}

void DeviceWork::release_inputs() {
  for (const auto& operation : operations_) {
    operation->release_inputs();
  }
}

std::shared_ptr<DeviceStreams> ProcessGroupSymm::streams_on(at::Device device) {
  auto& streams = streams_[device.index()];
  if (!streams) {
    streams = std::make_shared<DeviceStreams>(device);
  }
  return streams;
}

template <typename... What>
ProcessGroupSymm::WorkPtr ProcessGroupSymm::launch_recorded(
    const std::shared_ptr<Operation>& operation,
    const Caller& from,
    const What&... what) {
  return recorded(*operation, from, [&]() -> WorkPtr {
    c10::intrusive_ptr<DeviceWork> work;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto streams = streams_on(*operation->device);
      if (coalesced_) {
        auto& gathering = coalesced_->gathering;
        TORCH_CHECK_VALUE(
            !gathering || gathering->device() == *operation->device, operation->name(),
            ": the tensors are on ", *operation->device,
            ", those of earlier calls that are coalesced with it on ", gathering->device());
        if (!gathering || !gathering->add(operation, what...)) {
          gathering =
              c10::make_intrusive<DeviceWork>(getRank(), group_, std::move(streams), from.sequence);
          gathering->add(operation, what...);
          coalesced_->parts.push_back(gathering);
        }
        return gathering;
      }
      work = c10::make_intrusive<DeviceWork>(
          getRank(), group_, std::move(streams), *operation, from.sequence);
    }
    work->add(operation, what...);
    work->launch();
    return work;
  });
}

bool ProcessGroupSymm::launch_in_order(Operation& operation, std::chrono::milliseconds timeout) {
  if (operation.seen || operation.type == ::c10d::OpType::BARRIER || blocking_wait()) {
    return false;
  }
  std::shared_ptr<DeviceStreams> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (coalesced_) {
      return false;
    }
    streams = streams_on(*operation.device);
  }
  const c10::DeviceGuard guard(*operation.device);
  const auto stream = streams->current();
  copy_in_order(*streams, SideStream::Calls, operation, stream);
  const auto calls = operation.specs();
  const auto index = static_cast<int32_t>(operation.device->index());
  check((*group_)->launch(
      {calls.data(), calls.size()}, index, streams->handle(stream), false, timeout.count()));
  operation.write_back();
  return true;
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::launch_on_device(
    const std::shared_ptr<Operation>& operation,
    std::chrono::milliseconds timeout,
    bool async) {
  // torch.distributed accepts a null work if there is nothing to wait for; NCCL's backend also
  // returns a null work. An extension of the timeout needs a work, because it lasts until the work
  // has ended.
  if (!async && !extensions_.any() && launch_in_order(*operation, timeout)) {
    return nullptr;
  }
  auto work = launch_recorded(operation, caller((*group_)->sequence() + 1), timeout, async);
  begin_extensions(work);
  if (!async && operation->type == ::c10d::OpType::BARRIER) {
    work->wait();
  }
  return work;
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::launch_on_device(
    const std::shared_ptr<Operation>& operation,
    const MessageSpec& transfer,
    const Caller& from) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      transfer.peer >= 0,
      operation->name(), ": a receive from any rank into a tensor on ", *operation->device,
      " is not served; name the source, or receive into a CPU tensor");
  auto work = launch_recorded(operation, from, transfer);
  begin_extensions(work);
  return work;
}

std::optional<at::Device> ProcessGroupSymm::barrier_device(
    const ::c10d::BarrierOptions& opts) const {
  const auto requested = opts.device ? opts.device : getBoundDeviceId();
  if (opts.device && !opts.device->is_cuda()) {
    return std::nullopt;
  }
  if (!opts.device_ids.empty()) {
    return cuda_device(opts.device_ids.front());
  }
  if (!requested || !requested->is_cuda()) {
    return std::nullopt;
  }
  return requested->has_index() ? *requested
                                : c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();
}

void ProcessGroupSymm::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cuda()) {
    check((*group_)->connect(static_cast<int32_t>(device.index())));
  }
}

} // namespace symm
