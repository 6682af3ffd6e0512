// One c10d call in preparation: its checked tensors as plain spans for the core.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "compat.hpp"
#include "process_group/call_site.hpp"
#include "symm/src/bridge.rs.h"

namespace symm {

// Returns true if a profiler observes this thread. The check takes longer than copying a short
// message.
inline bool profiled() {
  return at::isRecordFunctionEnabled() && at::hasCallbacks();
}

// A collective in preparation. The spans of its `spec` are empty; `inputs` and `outputs` hold them.
struct PreparedCall {
  CallSpec spec;
  c10::SmallVector<Span, 2> inputs;
  c10::SmallVector<Span, 2> outputs;
};

using CallSpecs = c10::SmallVector<CallSpec, 1>;

// Steps of a call in its turn in the queue, for a call whose later collectives depend on the
// results of the prepared ones.
struct TurnSteps {
  // Fills the inputs of the prepared collectives.
  std::function<void()> before;
  // Runs after the prepared collectives, and runs `later_calls` more with
  // `GroupHandle::run_in_turn`.
  std::function<void()> after;
  size_t later_calls = 0;
};

// Owns every tensor that the core reads or writes, all on one device. Copies replace tensors that
// are not contiguous: `copy_in` fills them, and `write_back` copies the results back. Both belong
// to the call's turn, because earlier and later calls may use the same tensors.
class Operation {
 public:
  // `title` is the profiling name "symm:<op>"; its tail names the call in messages.
  Operation(::c10d::OpType type, const char* title) : type(type), title(title) {}

  // Starts a collective. The functions below add to it until the next `begin`.
  CallSpec& begin(Collective op, const at::Tensor& like, uint32_t site = call_site());
  // Sets the reduce op of the current collective, and its factor.
  void reduce_with(const ::c10d::ReduceOp& op);
  // Adds `tensor` as an input of the current collective.
  void add_input(const at::Tensor& tensor);
  // Adds `tensor` as an output of the current collective and a part of the result.
  void add_output(const at::Tensor& tensor);
  // Adds `tensor` as both input and output.
  void transform(const at::Tensor& tensor);
  // Adds consecutive parts of `tensor` with the given lengths in elements.
  void add_inputs(const at::Tensor& tensor, const std::vector<int64_t>& lengths);
  void add_outputs(const at::Tensor& tensor, const std::vector<int64_t>& lengths);

  // Records `tensor`, an input that the caller passed.
  void note_input(const at::Tensor& tensor) {
    if (seen) {
      inputs.push_back(tensor);
    }
  }
  // Returns a contiguous tensor that has the values of `tensor` after `copy_in`, kept alive.
  at::Tensor readable(const at::Tensor& tensor);
  // Returns a contiguous tensor whose values `write_back` copies to `tensor`, kept alive. No two of
  // them share memory; if outputs overlap, they are written in order, so the last one wins.
  at::Tensor writable(const at::Tensor& tensor, bool keep_values);
  // Returns true if the call needs `copy_in` or `write_back`. Each acts once.
  bool copies() const {
    return !to_fill_.empty() || !pending_.empty() || steps.after;
  }
  void copy_in();
  void write_back();
  // Passes the collectives to `begin`, a function of the core. If an input shares memory with an
  // output of this or an earlier collective, other than the output that replaces this input, the
  // core starts no collective and names such inputs. Copies then replace them, so that each keeps
  // its value from before the call, and `begin` is called again.
  template <typename Begin>
  Outcome begin_with(Begin begin) {
    while (true) {
      const auto calls = specs();
      auto outcome = begin(rust::Slice<const CallSpec>(calls.data(), calls.size()));
      if (outcome.asides.empty()) {
        return outcome;
      }
      for (const auto& aside : outcome.asides) {
        copy_input(this->calls[aside.call].inputs[aside.input]);
      }
    }
  }

  // Appends the collectives for the core to `specs`, with the spans of `calls`.
  void add_specs(CallSpecs& specs) const;
  CallSpecs specs() const {
    CallSpecs all;
    add_specs(all);
    return all;
  }

  // Releases all tensors except the outputs.
  void release_inputs();
  // Returns the results in the shape of Gloo's futures: one list, or several if `nested`.
  std::vector<std::vector<at::Tensor>> results() const;
  bool nested() const {
    return lists.size() > 1 || (coalesced && parts > 1);
  }
  // Returns the name of the call in messages: "all_reduce".
  std::string name() const;
  // Visits every tensor that the call reads or writes, some of them twice.
  template <typename Visit>
  void for_each_tensor(Visit visit) const {
    std::for_each(outputs.begin(), outputs.end(), visit);
    std::for_each(alive_.begin(), alive_.end(), visit);
  }
  bool on_cpu() const {
    return !device || device->is_cpu();
  }

  ::c10d::OpType type;
  const char* title;
  // True if a profiler observes the thread that makes the call.
  const bool seen = profiled();
  // The device of all tensors; absent before the first tensor.
  std::optional<at::Device> device;
  c10::SmallVector<PreparedCall, 1> calls;
  TurnSteps steps;
  // The caller's input tensors, for a profiler; empty without one.
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  // Splits of an all-to-all, for profilers.
  std::vector<int64_t> input_splits;
  std::vector<int64_t> output_splits;
  // The output lists of a call that takes lists; empty for other calls.
  std::vector<std::vector<at::Tensor>> lists;
  // Number of ranks whose parts make up each output; 0 if an output is one result.
  int64_t parts = 0;
  // True if the call gathers into several tensors at once; each rank's parts are then one list.
  bool coalesced = false;

 private:
  void check(const at::Tensor& tensor, const char* role);
  // Returns a contiguous tensor that `copy_in` fills with the values of `tensor`; both are kept
  // alive.
  at::Tensor copy_of(const at::Tensor& tensor);
  // Replaces `input` by a copy.
  void copy_input(Span& input);
  // Adds the memory of `tensor` to the written ranges; returns true if it overlaps an earlier one.
  bool aliases_output(const at::Tensor& tensor);

  c10::SmallVector<at::Tensor, 2> alive_;
  // Tensors and their copies: those that `copy_in` fills, and those that `write_back` reads.
  std::vector<std::pair<at::Tensor, at::Tensor>> to_fill_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pending_;
  // The written ranges, disjoint and ordered by address.
  c10::SmallVector<Span, 2> written_;
};

Span span_of(const at::Tensor& contiguous);
// Fails unless the memory of `output`, a CPU tensor, is writable. Checks only memory that torch did
// not allocate, and skips the storage that this thread checked last.
void check_writable(const at::Tensor& output, const char* op);

} // namespace symm
