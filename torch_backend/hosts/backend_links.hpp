// Backends of somebody else's, such as Gloo, between two ranks each: the core's links between hosts.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "hosts/engines.hpp"

namespace symm {

struct Link;

// All bytes go through tensors of its own, which a transfer that was given up keeps alive as long as the backend uses them.
class BackendLinks final : public LinksHandle {
 public:
  BackendLinks(std::string group, c10::intrusive_ptr<::c10d::Store> store) : maker_(std::move(group), std::move(store)) {}

  Status make(uint32_t peer, rust::Str engine, rust::Str name, bool second, int64_t timeout_ms) const noexcept override;
  Status send(uint32_t peer, rust::Slice<const uint8_t> frame, int32_t traffic, rust::Slice<const uint8_t> payload)
      const noexcept override;
  void confirm(uint32_t peer, uint64_t sends) const noexcept override;
  Status listen(uint32_t peer, int32_t traffic, size_t bytes) const noexcept override;
  Status wait(uint32_t peer, int32_t traffic, size_t& address) const noexcept override;
  void release(uint32_t peer, int32_t traffic) const noexcept override;
  void close(uint32_t peer) const noexcept override;

 private:
  // Link to `peer`; throws where there is none.
  std::shared_ptr<Link> link(uint32_t peer) const;
  // Link to `peer`, which this adds if `make` and `close` have not: it may be closed before it is made.
  std::shared_ptr<Link> entry(uint32_t peer) const;

  Maker maker_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  mutable std::map<uint32_t, std::shared_ptr<Link>> links_;
};

} // namespace symm
