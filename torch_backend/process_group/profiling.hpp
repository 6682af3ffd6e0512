// Records a call for profilers: name, sizes, dtype, group.
#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "process_group/operation.hpp"

namespace symm {

// Returns the inputs that a work shows to profilers.
inline std::optional<std::vector<at::Tensor>> profiled_inputs(const Operation& operation) {
  return operation.seen ? std::make_optional(operation.inputs) : std::nullopt;
}

// The process group that makes the call.
struct Caller {
  const std::string& group;
  const std::string& description;
  const std::vector<uint64_t>& global_ranks;
  int size;
  // The peer of a send or receive, otherwise the caller's own rank.
  int rank;
  uint64_t sequence;
  bool transfer;
};

// Runs `body`, recorded as `operation` if a profiler observes it; recording costs as much as a
// small collective.
template <typename Body>
auto recorded(const Operation& operation, const Caller& caller, Body body) {
  if (!operation.seen) {
    return body();
  }
  const auto elements = [](const std::vector<at::Tensor>& tensors) {
    int64_t count = 0;
    for (const auto& tensor : tensors) {
      count += tensor.numel();
    }
    return count;
  };
  int start = 0;
  int stride = 1;
  if (!caller.global_ranks.empty()) {
    ::c10d::getGlobalRankStartAndStride(caller.global_ranks, start, stride);
  }
  const auto dtype = operation.inputs.empty() ? at::kByte : operation.inputs.front().scalar_type();
  RECORD_PARAM_COMMS_DATA(
      std::make_tuple(static_cast<int64_t>(caller.sequence), caller.transfer),
      std::make_tuple(caller.group, caller.description),
      operation.inputs,
      operation.outputs,
      caller.rank,
      operation.name(),
      elements(operation.inputs),
      elements(operation.outputs),
      dtype,
      operation.input_splits,
      operation.output_splits,
      start,
      stride,
      caller.size);
  return body();
}

} // namespace symm
