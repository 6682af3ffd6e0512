#include "work/device_work.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <thread>

#include "errors.hpp"
#include "process_group/profiling.hpp"

namespace symm {

namespace {

using Milliseconds = std::chrono::milliseconds;

// Number of polls by a blocked host before it sleeps between polls.
constexpr int kEagerLooks = 200;
constexpr std::chrono::microseconds kNap(50);
// How often a blocked host runs the handlers of signals.
constexpr std::chrono::milliseconds kSignalInterval(100);
// How much longer than its group's timeout a blocked host waits. A kernel's deadline counts from
// the start of the kernel, and the kernel's error names the late ranks, while the error of the
// host's wait cannot.
constexpr std::chrono::milliseconds kKernelsFirst(1000);

} // namespace

DeviceWork::DeviceWork(
    int rank, Group group, std::shared_ptr<DeviceStreams> streams, const Operation& operation,
    uint64_t sequence)
    : Work(
          rank, operation.type, operation.seen ? operation.title : nullptr,
          profiled_inputs(operation)),
      group_(std::move(group)),
      streams_(std::move(streams)),
      sequence_(sequence) {}

DeviceWork::DeviceWork(
    int rank, Group group, std::shared_ptr<DeviceStreams> streams, uint64_t sequence)
    : Work(rank, ::c10d::OpType::COALESCED, profiled() ? "symm:coalesced" : nullptr),
      group_(std::move(group)),
      streams_(std::move(streams)),
      sequence_(sequence) {}

DeviceWork::~DeviceWork() {
  DeviceWork::release_resources();
}

void DeviceWork::release_resources() {
  const bool open = background_ && stream_ && !ordered_ && phase_ != Phase::Done;
  try {
    if (open || end_) {
      const c10::DeviceGuard guard(device());
      if (open) {
        keep_tensors();
      }
      if (end_) {
        streams_->put_back(std::move(*end_));
        end_.reset();
      }
    }
    operations_.clear();
    future_.reset();
  } catch (...) {
    // The driver is shut down already, and the memory with it.
  }
}

bool DeviceWork::add(
    const std::shared_ptr<Operation>& operation, Milliseconds timeout, bool background) {
  std::lock_guard<std::mutex> lock(mutex_);
  return gather(operation, timeout, background);
}

bool DeviceWork::add(const std::shared_ptr<Operation>& operation, const MessageSpec& transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!gather(operation, Milliseconds(transfer.timeout_ms), true)) {
    return false;
  }
  transfers_.push_back(transfer);
  return true;
}

bool DeviceWork::gather(
    const std::shared_ptr<Operation>& operation, Milliseconds timeout, bool background) {
  if (phase_ != Phase::Batching) {
    return false;
  }
  operations_.push_back(operation);
  if (const auto maker = streams_->current(); makers_.empty() || makers_.back() != maker) {
    makers_.push_back(maker);
  }
  background_ = background_ || background;
  const bool limited = timeout.count() > 0 && timeout_.value_or(timeout).count() > 0;
  timeout_ = limited ? std::max(timeout, timeout_.value_or(timeout)) : ::c10d::kUnsetTimeout;
  return true;
}

bool DeviceWork::isCompleted() {
  std::lock_guard<std::mutex> lock(mutex_);
  launch_batch();
  const auto now = progress();
  return now == Progress::Done || now == Progress::Recorded || failure();
}

bool DeviceWork::isSuccess() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto now = progress();
  return (now == Progress::Done || now == Progress::Recorded) && !failure();
}

std::exception_ptr DeviceWork::exception() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure();
}

void DeviceWork::rethrow() const {
  if (auto error = exception()) {
    std::rethrow_exception(error);
  }
}

int DeviceWork::sourceRank() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return transfers_.size() == 1 && !transfers_.front().send ? transfers_.front().peer : -1;
}

std::vector<at::Tensor> DeviceWork::result() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<at::Tensor> all;
  for (const auto& operation : operations_) {
    all.insert(all.end(), operation->outputs.begin(), operation->outputs.end());
  }
  return all;
}

void DeviceWork::synchronize() {
  std::lock_guard<std::mutex> lock(mutex_);
  launch_batch();
  if (phase_ == Phase::Refused) {
    return;
  }
  const auto waiting = streams_->current();
  if (waiting != *stream_) {
    const c10::DeviceGuard guard(device());
    end().block(waiting);
  }
  if (background_ && !ordered_) {
    // Freed memory returns to the stream on which the tensor was made, usually the stream that
    // launched the call.
    if (waiting != *origin_) {
      keep_tensors();
    }
    ordered_ = true;
    release_inputs();
  }
}

bool DeviceWork::wait(Milliseconds timeout) {
  timeout = wait_limit(timeout);
  synchronize();
  if (timeout.count() > 0 || opType_ == ::c10d::OpType::BARRIER || blocking_wait()) {
    block_host(timeout);
  } else if (background_) {
    rethrow();
  }
  return true;
}

void DeviceWork::block_host(Milliseconds timeout) {
  const auto begun = std::chrono::steady_clock::now();
  auto handled = begun;
  const auto limit = timeout.count() > 0 ? timeout : getTimeout() + kKernelsFirst;
  for (int looks = 0;; ++looks) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (progress() != Progress::Running || failure()) {
        break;
      }
    }
    const auto now = std::chrono::steady_clock::now();
    if (now - begun > limit) {
      wait_gave_up(limit);
    }
    if (looks < kEagerLooks) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(kNap);
    if (now - handled > kSignalInterval) {
      handled = now;
      handle_signals();
    }
  }
  rethrow();
}

Milliseconds DeviceWork::getTimeout() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto stated = timeout_.value_or(::c10d::kUnsetTimeout);
  return stated.count() > 0 ? stated : Milliseconds((*group_)->timeout());
}

void DeviceWork::abort() {
  (*group_)->abort();
}

uint64_t DeviceWork::getSequencenumber() const {
  return sequence_;
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  launch_batch();
  if (future_) {
    return future_;
  }
  c10::IValue value;
  c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
  if (operations_.size() == 1 && !operations_.front()->lists.empty()) {
    value = operations_.front()->lists;
    type = c10::ListType::create(type);
  } else {
    std::vector<at::Tensor> all;
    for (const auto& operation : operations_) {
      all.insert(all.end(), operation->outputs.begin(), operation->outputs.end());
    }
    value = std::move(all);
  }
  future_ =
      c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::vector<c10::Device>{device()});
  if (auto error = failure()) {
    future_->setError(error);
  } else {
    // The future records the current stream, and users of its value wait for that.
    const c10::StreamGuard guard(*stream_);
    future_->markCompleted(std::move(value));
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFutureResult() {
  return result_of(getFuture());
}

} // namespace symm
