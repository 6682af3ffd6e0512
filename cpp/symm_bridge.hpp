// What the Rust core asks of C++. No torch here: torch_backend/ implements the classes.
#pragma once

#include "rust/cxx.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace symm {

struct Status;
struct Piece;
struct Span;
struct StoreAnswer;
enum class StoreOp : uint8_t;

// A key-value store. What its functions guarantee stands in src/bridge.rs.
class StoreHandle {
 public:
  virtual ~StoreHandle() = default;
  virtual StoreAnswer call(
      StoreOp op,
      rust::Slice<const Piece> keys,
      rust::Slice<const Piece> values,
      int64_t amount,
      int64_t timeout_ms) const noexcept = 0;
  virtual bool extended() const = 0;
  virtual int64_t timeout_ms() const = 0;
  virtual rust::String name() const = 0;
};

// A backend between hosts. What its functions guarantee stands in src/bridge.rs and src/hosts/rail.rs.
class RailHandle {
 public:
  virtual ~RailHandle() = default;
  virtual Status engines(rust::Str named, rust::String& cpu, rust::String& cuda) const noexcept = 0;
  virtual Status make(rust::Str engine, rust::Str name, size_t host, size_t hosts, int64_t timeout_ms) const noexcept = 0;
  virtual void give_up() const noexcept = 0;
  virtual Status staging(size_t bytes, size_t& address) const noexcept = 0;
  virtual Status all_gather(size_t from, size_t each, size_t to, int64_t timeout_ms) const noexcept = 0;
  virtual Status all_to_all(
      size_t from,
      rust::Slice<const size_t> sent,
      size_t to,
      rust::Slice<const size_t> received,
      int64_t timeout_ms) const noexcept = 0;
  virtual Status broadcast(size_t root, size_t at, size_t bytes, int64_t timeout_ms) const noexcept = 0;
  virtual Status wait(int64_t limit_ms) const noexcept = 0;
};

// Backends of two ranks on different hosts. What its functions guarantee stands in src/bridge.rs and src/hosts/messages/links.rs.
class LinksHandle {
 public:
  virtual ~LinksHandle() = default;
  virtual Status make(uint32_t peer, rust::Str engine, rust::Str name, bool second, int64_t timeout_ms) const noexcept = 0;
  virtual Status send(
      uint32_t peer,
      rust::Slice<const uint8_t> frame,
      int32_t traffic,
      rust::Slice<const uint8_t> payload) const noexcept = 0;
  virtual void confirm(uint32_t peer, uint64_t sends) const noexcept = 0;
  virtual Status listen(uint32_t peer, int32_t traffic, size_t bytes) const noexcept = 0;
  virtual Status wait(uint32_t peer, int32_t traffic, size_t& address) const noexcept = 0;
  virtual void release(uint32_t peer, int32_t traffic) const noexcept = 0;
  virtual void close(uint32_t peer) const noexcept = 0;
};

// Backends of a GPU, between hosts. What its functions guarantee stands in src/bridge.rs and src/hosts/cuda/backends.rs.
class DeviceBackendsHandle {
 public:
  virtual ~DeviceBackendsHandle() = default;
  virtual Status make(
      uint32_t which,
      rust::Str engine,
      rust::Str name,
      std::array<size_t, 2> ranks,
      int32_t device,
      int64_t timeout_ms) const noexcept = 0;
  virtual Status memory(int32_t device, size_t bytes, size_t& address) const noexcept = 0;
  virtual Status follow(bool all) const noexcept = 0;
  virtual Status all_gather(int32_t device, size_t from, size_t each, size_t to, bool beside) const noexcept = 0;
  virtual Status all_to_all(
      int32_t device,
      std::array<size_t, 2> at,
      rust::Slice<const size_t> sent,
      rust::Slice<const size_t> received,
      bool beside) const noexcept = 0;
  virtual Status broadcast(int32_t device, size_t root, size_t at, size_t bytes, bool beside) const noexcept = 0;
  virtual Status exchange(uint32_t which, int32_t device, rust::Slice<const Span> give, rust::Slice<const Span> take)
      const noexcept = 0;
  virtual void abort(uint32_t which) const noexcept = 0;
  virtual void close() const noexcept = 0;
};

// Python's signals. What its function guarantees stands in src/bridge.rs.
class InterruptHandle {
 public:
  virtual ~InterruptHandle() = default;
  virtual bool raised() const noexcept = 0;
};

// Where the outcome of an asynchronous call goes; called once, on any thread.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void complete(const Status& status, int32_t source) const = 0;
};

// Gives up the windows that begin in `bytes` at `address`, memory of a device that is about to be given back.
void forget_windows(size_t address, size_t bytes) noexcept;
// Sets what `forget_windows` calls from now on.
void on_forget_windows(void (*forget)(size_t address, size_t bytes) noexcept);

} // namespace symm
