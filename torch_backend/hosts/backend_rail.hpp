// A backend of somebody else's, such as Gloo, as the core's rail between hosts.
#pragma once

#include <ATen/ATen.h>

#include <deque>
#include <string>

#include "hosts/engines.hpp"

namespace symm {

// One rail: bytes go through a tensor of its own, which a transfer that was given up keeps alive as long as the backend uses it.
class BackendRail final : public RailHandle {
 public:
  BackendRail(std::string group, c10::intrusive_ptr<::c10d::Store> store) : maker_(std::move(group), std::move(store)) {}

  Status engines(rust::Str named, rust::String& cpu, rust::String& cuda) const noexcept override;
  Status make(rust::Str engine, rust::Str name, size_t host, size_t hosts, int64_t timeout_ms) const noexcept override;
  void give_up() const noexcept override;
  Status staging(size_t bytes, size_t& address) const noexcept override;
  Status all_gather(size_t from, size_t each, size_t to, int64_t timeout_ms) const noexcept override;
  Status all_to_all(
      size_t from,
      rust::Slice<const size_t> sent,
      size_t to,
      rust::Slice<const size_t> received,
      int64_t timeout_ms) const noexcept override;
  Status broadcast(size_t root, size_t at, size_t bytes, int64_t timeout_ms) const noexcept override;
  Status wait(int64_t limit_ms) const noexcept override;

 private:
  at::Tensor part(size_t at, size_t bytes) const;

  Maker maker_;
  const GivenUp given_up_ = std::make_shared<std::atomic<bool>>(false);
  // Set by functions that the core calls one after another.
  mutable Engine backend_;
  mutable at::Tensor staging_;
  // What is under way, the oldest first.
  mutable std::deque<c10::intrusive_ptr<::c10d::Work>> works_;
  mutable size_t hosts_ = 0;
};

} // namespace symm
