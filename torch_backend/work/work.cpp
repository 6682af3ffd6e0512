#include "work/work.hpp"

#include "errors.hpp"
#include "process_group/record.hpp"

namespace symm {

namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;

} // namespace

WorkSymm::WorkSymm(int rank, Group group, std::shared_ptr<Operation> operation, uint64_t sequence)
    : Work(rank, operation->type, operation->seen ? operation->title : nullptr, profiled_inputs(*operation)),
      group_(std::move(group)),
      operation_(std::move(operation)),
      sequence_(sequence) {}

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
  return operation_->outputs;
}

void WorkSymm::set_ticket(uint64_t ticket) {
  ticket_ = ticket;
  if (ticket == 0) {
    rethrow();
  }
}

void WorkSymm::rethrow() const {
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
    check((*group_)->wait(ticket_, timeout.count()));
  }
  Future future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) {
    // Its value is read without waiting by those who have waited here; the completing thread is about to set it.
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

void WorkSymm::complete(std::exception_ptr error, int source) {
  if (!error) {
    try {
      operation_->write_back();
    } catch (...) {
      error = std::current_exception();
    }
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
  } else if (operation_->lists.empty()) {
    future.markCompleted(c10::IValue(operation_->outputs));
  } else {
    future.markCompleted(c10::IValue(operation_->lists));
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
        operation_->lists.empty() ? c10::TypePtr(tensors) : c10::TypePtr(c10::ListType::create(tensors));
    future_ = c10::make_intrusive<c10::ivalue::Future>(type);
    future = future_;
    completed = completed_;
  }
  if (completed) {
    fulfil(*future);
    future->wait();
  } else {
    // Who waits for a future does not come to wait().
    (*group_)->progress();
  }
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkSymm::getFutureResult() {
  auto outcome = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  getFuture()->addCallback([outcome](c10::ivalue::Future& future) {
    const auto result = future.hasError() ? ::c10d::WorkResult::COMM_ERROR : ::c10d::WorkResult::SUCCESS;
    outcome->markCompleted(c10::IValue(static_cast<int64_t>(result)));
  });
  return outcome;
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
  for (const auto& part : parts_) {
    part->wait(timeout);
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
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  auto left = std::make_shared<std::atomic<size_t>>(parts_.size() + 1);
  auto all = result();
  // Once, by whoever is the last: maybe the thread that completes a call, which no exception may leave.
  auto one_less = [left, all, on_devices, future = future_] {
    if (left->fetch_sub(1) > 1 || future->completed()) {
      return;
    }
    try {
      // The future marks the current streams, which must stand behind every part.
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
  // The call itself has ended by the time that what a user has hung on its future can throw; the bridge ends the process at an exception.
  try {
    work_->complete(exception_of(status), source);
  } catch (const std::exception& error) {
    TORCH_WARN("a callback on the future of a call failed: ", error.what());
  } catch (...) {
    TORCH_WARN("a callback on the future of a call failed");
  }
}

} // namespace symm
