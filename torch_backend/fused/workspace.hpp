// Memory through which the ranks of a group exchange shards and parts of matrix products, and when it may be written again.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fused/lanes.hpp"

namespace symm {

// Channels of the workspace's signal pads. Each word is set and cleared again within a call.
enum class Channel : uint8_t {
  // All ranks have come to the call.
  Entry,
  // All ranks' shards lie in the workspace.
  Ready,
  // A part lies in the workspace for the rank that is told.
  Part,
  // All ranks have read what they wanted.
  Exit,
};

// Piece of the workspace that a call uses.
struct Turn {
  // Length in bytes; the same on all ranks.
  size_t offset;
  // The call must not write before all ranks have come to it.
  bool entry;
};

// Workspace of one group on one device. Calls take turns: who uses it holds `mutex`.
//
// When may a rank write into its piece again? Peers read it until their part of that call ends, and every rank orders what it sends in a
// call after its reads of earlier calls (`Lanes` join at a call's end). Within a call, each rank receives from every peer before the call
// ends: so whoever has completed a call knows that all peers have read what they wanted of every call *before* it. Two consecutive calls
// therefore use different pieces, and no barrier is needed at a call's end: writing in call k over the piece of call k - 2 is safe since
// call k - 1 has completed on this stream.
//
// A graph breaks "consecutive calls": it may be replayed after itself, after another graph, or between eager calls, which the host does
// not see. So recorded calls have two pieces of their own, and the first of each capture begins with a barrier of all ranks, after which
// no peer reads anything from before. Eager calls alternate between the other two: whatever is replayed between them uses neither.
// Large workspaces have one piece, and each call begins with the barrier.
class Workspace {
 public:
  // Workspace of the group with this name, made when it is first asked for, and given up with the group.
  static std::shared_ptr<Workspace> of(const std::string& group_name, at::Device device);
  // Gives up those whose group is no more, and that of `group_name`.
  static void drop(const std::string& group_name);

  Workspace(std::string group_name, at::Device device, const c10::intrusive_ptr<::c10d::ProcessGroup>& group);

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  at::Device device() const {
    return lanes.device();
  }

  // Begins a call that needs `bytes` of each rank; all ranks need equally many. A workspace that is too small is made anew, which waits
  // for the device and for all ranks, and is refused while a graph is recorded.
  Turn begin(size_t bytes, const char* op);
  // Runs `body`, which enqueues the call, and ends it: all streams meet in the caller's. After a failure, too, since what was enqueued
  // until then uses memory that the caller is about to give up.
  template <typename Body>
  void ended(const Body& body) {
    try {
      body();
    } catch (...) {
      abandon();
      throw;
    }
    lanes.end();
    // On the CPU it costs nothing beside a product, and a rank may end its group, and with it the workspace, right after the call: what a
    // peer still read there would be zeros. On GPUs what is mapped stays as it was.
    if (device().is_cpu()) {
      barrier(Channel::Exit);
    }
  }

  // A matrix in the piece of `rank`, `bytes` behind its begin.
  at::Tensor matrix(int rank, const Turn& turn, size_t bytes, at::IntArrayRef sizes, at::ScalarType dtype) const;
  void barrier(Channel channel) const;
  void put_signal(int peer, Channel channel) const;
  void wait_signal(int peer, Channel channel) const;

  std::mutex mutex;
  Lanes lanes;

 private:
  using Window = c10::intrusive_ptr<::c10d::symmetric_memory::SymmetricMemory>;

  void grow(size_t bytes, const char* op);
  void abandon() noexcept;

  const std::string group_name_;
  const c10::weak_intrusive_ptr<::c10d::ProcessGroup> group_;
  const int rank_;
  const int size_;
  // The windows before, where graphs use them.
  std::vector<std::pair<at::Tensor, Window>> kept_;
  at::Tensor memory_;
  Window window_;
  size_t piece_bytes_ = 0;
  size_t pieces_ = 0;
  // Calls so far, eager ones and recorded ones; the number of the last capture.
  std::array<uint64_t, 2> calls_{};
  uint64_t capture_ = 0;
  // Graphs use the memory.
  bool recorded_ = false;
};

} // namespace symm
