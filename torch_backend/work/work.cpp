#include "work/work.hpp"

#include <algorithm>
#include <iomanip>

#include "errors.hpp"
#include "process_group/profiling.hpp"

namespace symm {

namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;

} // namespace

std::chrono::milliseconds wait_limit(std::chrono::milliseconds timeout) {
  return timeout.count() < 0 ? std::chrono::milliseconds(1) : timeout;
}

void wait_gave_up(std::chrono::milliseconds limit) {
  const auto text = c10::str(
      "wait() gave up after ", std::fixed, std::setprecision(1), limit.count() / 1000.0,
      " s; the call itself goes on");
  std::rethrow_exception(exception_of(Status{ErrorKind::WaitTimeout, text}));
}

Future result_of(const Future& future) {
  auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  future->addCallback([result](c10::ivalue::Future& ended) {
    auto found = ::c10d::WorkResult::SUCCESS;
    if (ended.hasError()) {
      found = timed_out(ended.exception_ptr()) ? ::c10d::WorkResult::TIMEOUT
                                               : ::c10d::WorkResult::COMM_ERROR;
    }
    result->markCompleted(c10::IValue(static_cast<int64_t>(found)));
  });
  return result;
}

WorkSymm::WorkSymm(
    int rank, Group group, std::shared_ptr<Operation> operation, std::chrono::milliseconds timeout)
    : Work(
          rank, operation->type, operation->seen ? operation->title : nullptr,
          profiled_inputs(*operation)),
      group_(std::move(group)),
      operation_(std::move(operation)),
      timeout_(timeout) {}

bool WorkSymm::ended() const {
  return completed_ && (!future_ || future_->completed());
}

bool WorkSymm::isCompleted() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended()) {
      return true;
    }
  }
  (*group_)->progress();
  std::lock_guard<std::mutex> lock(mutex_);
  return ended();
}

bool WorkSymm::isSuccess() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

int WorkSymm::sourceRank() const {
  return source_;
}

std::vector<at::Tensor> WorkSymm::result() {
  return operation_->nested() ? operation_->outputs : operation_->results().front();
}

void WorkSymm::begun(uint64_t sequence, uint64_t ticket) {
  sequence_ = sequence;
  ticket_ = ticket;
}

void WorkSymm::rethrow() const {
  rethrow_interrupt();
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error = exception_;
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

bool WorkSymm::wait(std::chrono::milliseconds timeout) {
  bool completed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    completed = completed_;
  }
  if (!completed) {
    check((*group_)->wait(ticket_, wait_limit(timeout).count()));
  }
  Future future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) {
    // The completing thread is about to set the future's value. Wait for that, because the caller
    // may read the value without waiting.
    future->wait();
  }
  rethrow();
  return true;
}

void WorkSymm::abort() {
  (*group_)->abort();
}

uint64_t WorkSymm::getSequencenumber() const {
  return sequence_;
}

void WorkSymm::copy_in() noexcept {
  try {
    operation_->copy_in();
  } catch (...) {
    copy_error_ = std::current_exception();
  }
}

void WorkSymm::write_back() noexcept {
  try {
    operation_->write_back();
  } catch (...) {
    if (!copy_error_) {
      copy_error_ = std::current_exception();
    }
  }
}

void WorkSymm::complete(std::exception_ptr error, int source) {
  if (!error) {
    write_back();
    error = copy_error_;
  }
  source_ = source;
  Future future;
  finish(error);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) {
    fulfil(*future);
  }
}

void WorkSymm::fulfil(c10::ivalue::Future& future) {
  if (fulfilled_.test_and_set()) {
    return;
  }
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error = exception_;
  }
  if (error) {
    future.setError(error);
  } else if (operation_->nested()) {
    future.markCompleted(c10::IValue(operation_->results()));
  } else {
    future.markCompleted(c10::IValue(operation_->results().front()));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> WorkSymm::getFuture() {
  bool completed = false;
  Future future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) {
      return future_;
    }
    const auto tensors = c10::ListType::create(c10::TensorType::get());
    const c10::TypePtr type =
        operation_->nested() ? c10::TypePtr(c10::ListType::create(tensors)) : c10::TypePtr(tensors);
    future_ = c10::make_intrusive<c10::ivalue::Future>(type);
    future = future_;
    completed = completed_;
  }
  if (completed) {
    fulfil(*future);
    future->wait();
  } else {
    // A caller that waits for a future does not call wait(), so messages advance here.
    (*group_)->progress();
  }
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkSymm::getFutureResult() {
  return result_of(getFuture());
}

WorkCoalesced::WorkCoalesced(int rank, std::vector<c10::intrusive_ptr<::c10d::Work>> parts)
    : Work(rank, ::c10d::OpType::COALESCED), parts_(std::move(parts)) {}

bool WorkCoalesced::isCompleted() {
  bool all = true;
  for (const auto& part : parts_) {
    all = part->isCompleted() && all;
  }
  return all;
}

bool WorkCoalesced::isSuccess() const {
  for (const auto& part : parts_) {
    if (!part->isSuccess()) {
      return false;
    }
  }
  return true;
}

std::exception_ptr WorkCoalesced::exception() const {
  for (const auto& part : parts_) {
    if (auto error = part->exception()) {
      return error;
    }
  }
  return nullptr;
}

std::vector<at::Tensor> WorkCoalesced::result() {
  std::vector<at::Tensor> all;
  for (const auto& part : parts_) {
    const auto some = part->result();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

void WorkCoalesced::synchronize() {
  for (const auto& part : parts_) {
    part->synchronize();
  }
}

bool WorkCoalesced::wait(std::chrono::milliseconds timeout) {
  timeout = wait_limit(timeout);
  // A longer time would overflow the clock.
  constexpr std::chrono::milliseconds longest = std::chrono::hours(24 * 365 * 100);
  const auto limit = std::chrono::steady_clock::now() + std::min(timeout, longest);
  for (const auto& part : parts_) {
    if (timeout.count() <= 0) {
      part->wait(timeout);
      continue;
    }
    // One limit for all parts. A part that has ended is not late, even if the limit has passed.
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(limit - std::chrono::steady_clock::now());
    try {
      part->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (...) {
      if (is_python_error(std::current_exception()) || std::chrono::steady_clock::now() < limit ||
          part->isCompleted()) {
        throw;
      }
      wait_gave_up(timeout);
    }
  }
  return true;
}

void WorkCoalesced::abort() {
  for (const auto& part : parts_) {
    part->abort();
  }
}

uint64_t WorkCoalesced::getSequencenumber() const {
  return parts_.empty() ? 0 : parts_.front()->getSequencenumber();
}

std::chrono::milliseconds WorkCoalesced::getTimeout() const {
  std::chrono::milliseconds longest(0);
#if TORCH_VERSION_MINOR >= 14
  for (const auto& part : parts_) {
    longest = std::max(longest, part->getTimeout());
  }
#endif
  return longest;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkCoalesced::getFutureResult() {
  return result_of(getFuture());
}

c10::intrusive_ptr<c10::ivalue::Future> WorkCoalesced::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (future_) {
    return future_;
  }
  std::vector<c10::Device> devices;
  std::vector<c10::intrusive_ptr<::c10d::Work>> on_devices;
  for (const auto& part : parts_) {
    const auto some = part->getFuture()->devices();
    devices.insert(devices.end(), some.begin(), some.end());
    if (!some.empty()) {
      on_devices.push_back(part);
    }
  }
  future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), devices);
  auto left = std::make_shared<std::atomic<size_t>>(parts_.size() + 1);
  auto all = result();
  // Called when a part completes, and once below; the last call completes the future. It may run on
  // the thread that completes a part, which must not throw.
  auto one_less = [left, all, on_devices, future = future_] {
    if (left->fetch_sub(1) > 1 || future->completed()) {
      return;
    }
    try {
      // The future records the current streams, which must be ordered after every part.
      for (const auto& work : on_devices) {
        work->synchronize();
      }
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
      return;
    }
    future->markCompleted(c10::IValue(all));
  };
  for (const auto& part : parts_) {
    part->getFuture()->addCallback([one_less, future = future_](c10::ivalue::Future& part) {
      if (part.hasError()) {
        future->setErrorIfNeeded(part.exception_ptr());
      }
      one_less();
    });
  }
  one_less();
  return future_;
}

void WorkCompletion::complete(const Status& status, int32_t source) const {
  // The call has ended before callbacks on its future can throw; an exception in the bridge would
  // end the process.
  try {
    work_->complete(exception_of(status), source);
  } catch (const std::exception& error) {
    TORCH_WARN("a callback on the future of a call failed: ", error.what());
  } catch (...) {
    TORCH_WARN("a callback on the future of a call failed");
  }
}

} // namespace symm
