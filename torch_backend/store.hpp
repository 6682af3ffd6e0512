// torch's store behind the core's.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "symm_bridge.hpp"

namespace symm {

class TorchStore final : public StoreHandle {
 public:
  explicit TorchStore(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {}

  rust::Vec<uint8_t> compare_set(
      rust::Str key,
      rust::Slice<const uint8_t> expected,
      rust::Slice<const uint8_t> desired) const override;
  bool wait(rust::Slice<const rust::String> keys, int64_t timeout_ms) const override;
  rust::Vec<Bytes> multi_get(rust::Slice<const rust::String> keys) const override;
  bool check(rust::Slice<const rust::String> keys) const override;
  void remove(rust::Str key) const override;

 private:
  c10::intrusive_ptr<::c10d::Store> store_;
};

} // namespace symm
