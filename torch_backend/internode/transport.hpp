// Other backends, such as Gloo and NCCL, between nodes. They move bytes; the core decides which
// bytes they move, and when.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "symm/src/bridge.rs.h"
#include "symm/src/bridge/transport.rs.h"
#include "symm_bridge.hpp"

namespace symm {

// Creates the transports of one group, which connect through its store, and the memory that
// transfers use.
class Transports final : public TransportsHandle {
 public:
  Transports(std::string group, c10::intrusive_ptr<::c10d::Store> store)
      : group_(std::move(group)), store_(std::move(store)) {}

  Status find(rust::Str named, rust::String& cpu, rust::String& cuda) const noexcept override;
  Connected connect(
      rust::Str backend, rust::Str name, const Seat& seat, int64_t timeout_ms, bool patient,
      rust::Box<GivenUp> given_up) const noexcept override;
  Allocated allocate(int32_t device, size_t bytes) const noexcept override;

 private:
  std::string group_;
  c10::intrusive_ptr<::c10d::Store> store_;
};

} // namespace symm
