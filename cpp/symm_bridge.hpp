// What the Rust core asks of C++. No torch here: torch_backend/ implements the two classes.
#pragma once

#include "rust/cxx.h"

#include <cstdint>
#include <memory>

namespace symm {

struct Status;
struct Bytes;

// A key-value store. Functions throw std::exception on failure.
class StoreHandle {
 public:
  virtual ~StoreHandle() = default;
  virtual rust::Vec<uint8_t> compare_set(
      rust::Str key,
      rust::Slice<const uint8_t> expected,
      rust::Slice<const uint8_t> desired) const = 0;
  // False once the time has passed.
  virtual bool wait(rust::Slice<const rust::String> keys, int64_t timeout_ms) const = 0;
  virtual rust::Vec<Bytes> multi_get(rust::Slice<const rust::String> keys) const = 0;
  virtual bool check(rust::Slice<const rust::String> keys) const = 0;
  virtual void remove(rust::Str key) const = 0;
};

// Where the outcome of an asynchronous call goes; called once, on any thread.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void complete(const Status& status, int32_t source) const = 0;
};

} // namespace symm
