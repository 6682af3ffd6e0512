// The handle of one call.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <memory>
#include <vector>

#include "process_group/operation.hpp"
#include "symm/src/bridge.rs.h"

namespace symm {

using Group = std::shared_ptr<rust::Box<GroupHandle>>;

// Returns the limit that a caller of `wait` means. As in c10d, a wait with 0 is unlimited. A
// negative timeout is a deadline that has passed.
std::chrono::milliseconds wait_limit(std::chrono::milliseconds timeout);

// Throws the SymmTimeoutError of a `wait(limit)` that ends before its call does; the group stays
// usable.
[[noreturn]] void wait_gave_up(std::chrono::milliseconds limit);

// Returns a future of the `WorkResult` with which `future` ends: TIMEOUT for a SymmTimeoutError,
// COMM_ERROR for every other error.
c10::intrusive_ptr<c10::ivalue::Future> result_of(
    const c10::intrusive_ptr<c10::ivalue::Future>& future);

// A call that runs, has run, or waits in the group's queue. Owns the call's tensors.
class WorkSymm final : public ::c10d::Work {
 public:
  WorkSymm(
      int rank, Group group, std::shared_ptr<Operation> operation,
      std::chrono::milliseconds timeout);

  bool isCompleted() override;
  bool isSuccess() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  // Does nothing: no stream waits for host memory.
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;
  std::chrono::milliseconds getTimeout() const SYMM_OVERRIDE_TIMEOUTS {
    return timeout_;
  }

  // See `Completion`. An exception of a copy becomes the call's error.
  bool copies() const {
    return operation_->copies();
  }
  void copy_in() noexcept;
  void write_back() noexcept;
  size_t later_calls() const {
    return operation_->steps.later_calls;
  }
  // Ends the call: writes results back, then notifies waiting threads, then completes the future.
  void complete(std::exception_ptr error, int source);
  // Sets the call's number in the group, and its ticket for `Group::wait`.
  void begun(uint64_t sequence, uint64_t ticket);
  // Throws the call's exception, if it has one.
  void rethrow() const;
  // Releases the call's tensors. c10 calls this instead of the destructor while `TimeoutExtensions`
  // still refers to this work.
  void release_resources() override {
    operation_.reset();
    future_.reset();
  }

 private:
  // Returns true if both the call and its future, if one was requested, have ended. `mutex_` must
  // be held.
  bool ended() const;
  // Completes the future once, on the thread that first sees both the future and the end of the
  // call.
  void fulfil(c10::ivalue::Future& future);

  Group group_;
  std::shared_ptr<Operation> operation_;
  uint64_t sequence_ = 0;
  std::chrono::milliseconds timeout_;
  uint64_t ticket_ = 0;
  int source_ = -1;
  // Set and read by the thread that runs the call.
  std::exception_ptr copy_error_;
  std::atomic_flag fulfilled_ = ATOMIC_FLAG_INIT;
  // Guarded by mutex_ of the base.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The work of several calls as one.
class WorkCoalesced final : public ::c10d::Work {
 public:
  WorkCoalesced(int rank, std::vector<c10::intrusive_ptr<::c10d::Work>> parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;
  // The longest timeout of a part.
  std::chrono::milliseconds getTimeout() const SYMM_OVERRIDE_TIMEOUTS;

 private:
  std::vector<c10::intrusive_ptr<::c10d::Work>> parts_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The completion that the core calls when an asynchronous call has ended.
class WorkCompletion final : public Completion {
 public:
  explicit WorkCompletion(c10::intrusive_ptr<WorkSymm> work) : work_(std::move(work)) {}
  bool copies() const override {
    return work_->copies();
  }
  void copy_in() const override {
    work_->copy_in();
  }
  void write_back() const override {
    work_->write_back();
  }
  size_t later_calls() const override {
    return work_->later_calls();
  }
  void complete(const Status& status, int32_t source) const override;

 private:
  c10::intrusive_ptr<WorkSymm> work_;
};

} // namespace symm
