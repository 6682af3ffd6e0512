// The interfaces that the Rust core needs from C++, without torch; torch_backend/ implements the
// classes.
#pragma once

#include "rust/cxx.h"

#include <cstddef>
#include <cstdint>
#include <memory>

namespace symm {

struct Allocated;
struct Connected;
struct GivenUp;
struct Manner;
struct Blob;
struct Seat;
struct Span;
struct Started;
struct Status;
struct StoreReply;
enum class StoreOp : uint8_t;

// A key-value store. `src/bridge.rs` documents the contract of each function.
class StoreHandle {
 public:
  virtual ~StoreHandle() = default;
  virtual StoreReply call(
      StoreOp op,
      rust::Slice<const Blob> keys,
      rust::Slice<const Blob> values,
      int64_t amount,
      int64_t timeout_ms) const noexcept = 0;
  virtual bool extended() const = 0;
  virtual int64_t timeout_ms() const = 0;
  virtual rust::String name() const = 0;
};

// Memory for transfers between nodes. `src/bridge/transport.rs` documents the contract of this and
// the next three classes.
class BufferHandle {
 public:
  virtual ~BufferHandle() = default;
  virtual size_t address() const noexcept = 0;
};

// A transfer that has started.
class PendingHandle {
 public:
  virtual ~PendingHandle() = default;
  virtual Status wait(int64_t limit_ms) const noexcept = 0;
  virtual Status follow() const noexcept = 0;
  virtual Status abort() const noexcept = 0;
};

// A backend between some ranks.
class TransportHandle {
 public:
  virtual ~TransportHandle() = default;
  virtual Started all_gather(
      const Span& from, const Span& to, const std::shared_ptr<BufferHandle>& keep,
      const Manner& manner) const noexcept = 0;
  virtual Started all_to_all(
      const Span& from,
      rust::Slice<const size_t> sent,
      const Span& to,
      rust::Slice<const size_t> received,
      const std::shared_ptr<BufferHandle>& keep,
      const Manner& manner) const noexcept = 0;
  virtual Started broadcast(
      size_t root, const Span& at, const std::shared_ptr<BufferHandle>& keep,
      const Manner& manner) const noexcept = 0;
  virtual Started send(
      size_t to, const Span& from, int32_t tag,
      const std::shared_ptr<BufferHandle>& keep) const noexcept = 0;
  virtual Started recv(
      size_t from, const Span& to, int32_t tag,
      const std::shared_ptr<BufferHandle>& keep) const noexcept = 0;
  virtual Started exchange(
      rust::Slice<const Span> give, rust::Slice<const Span> take) const noexcept = 0;
  virtual void abort() const noexcept = 0;
  virtual void shutdown() const noexcept = 0;
};

// A factory of these backends.
class TransportsHandle {
 public:
  virtual ~TransportsHandle() = default;
  virtual Status find(rust::Str named, rust::String& cpu, rust::String& cuda) const noexcept = 0;
  virtual Connected connect(
      rust::Str engine, rust::Str name, const Seat& seat, int64_t timeout_ms, bool patient,
      rust::Box<GivenUp> given_up) const noexcept = 0;
  virtual Allocated allocate(int32_t device, size_t bytes) const noexcept = 0;
};

// Python's signals. `src/bridge.rs` documents the contract.
class InterruptHandle {
 public:
  virtual ~InterruptHandle() = default;
  virtual bool is_pending() const noexcept = 0;
};

// The receiver of the outcome of an asynchronous call. `src/bridge.rs` documents the contract.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual bool copies() const = 0;
  virtual void copy_in() const = 0;
  virtual void write_back() const = 0;
  virtual size_t later_calls() const = 0;
  virtual void complete(const Status& status, int32_t source) const = 0;
};

// Forgets the windows that start in `bytes` at `address`, device memory that is about to be freed.
void forget_windows(size_t address, size_t bytes) noexcept;
// Sets the function that `forget_windows` calls from now on.
void on_forget_windows(void (*forget)(size_t address, size_t bytes) noexcept);

} // namespace symm
