// What the Rust core asks of C++. No torch here: torch_backend/ implements the classes.
#pragma once

#include "rust/cxx.h"

#include <cstddef>
#include <cstdint>
#include <memory>

namespace symm {

struct Status;
struct Piece;
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
