// torch's store behind the core's interface.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "symm_bridge.hpp"

namespace symm {

class TorchStore final : public StoreHandle {
 public:
  explicit TorchStore(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {}

  StoreReply call(
      StoreOp op,
      rust::Slice<const Blob> keys,
      rust::Slice<const Blob> values,
      int64_t amount,
      int64_t timeout_ms) const noexcept override;
  bool extended() const override;
  int64_t timeout_ms() const override;
  rust::String name() const override;

 private:
  c10::intrusive_ptr<::c10d::Store> store_;
};

} // namespace symm
