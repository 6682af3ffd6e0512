// Operation: one c10d call in preparation: its tensors, checked, as plain spans for the core.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "compat.hpp"
#include "symm/src/bridge.rs.h"

namespace symm {

// Whether a profiler listens to this thread. To ask takes longer than to copy a short message.
inline bool profiled() {
  return at::isRecordFunctionEnabled() && at::hasCallbacks();
}

// A collective in preparation. The spans of its `spec` are empty; these are what it reads and writes.
struct PreparedCall {
  CallSpec spec;
  c10::SmallVector<Span, 2> inputs;
  c10::SmallVector<Span, 2> outputs;
};

using CallSpecs = c10::SmallVector<CallSpec, 1>;

// Owns every tensor that the core reads or writes, all of one device. Tensors that are not contiguous are replaced by copies, and results
// are written back by `write_back`.
class Operation {
 public:
  // `title` is the profiling name "symm:<op>"; its tail names the call in messages.
  Operation(::c10d::OpType type, const char* title) : type(type), title(title) {}

  // Begins a collective; the spans that follow belong to it.
  CallSpec& begin(Collective op, const at::Tensor& like);
  // The reduce op of the current collective and its factor.
  void reduce_with(const ::c10d::ReduceOp& op);
  // `tensor` as an input of the current collective.
  void give(const at::Tensor& tensor);
  // `tensor` as an output of the current collective; it is part of the result.
  void take(const at::Tensor& tensor);
  // `tensor` as input and output in one.
  void transform(const at::Tensor& tensor);
  // `pieces` consecutive parts of `tensor` of the given lengths in elements.
  void give_pieces(const at::Tensor& tensor, const std::vector<int64_t>& lengths);
  void take_pieces(const at::Tensor& tensor, const std::vector<int64_t>& lengths);

  // Notes `tensor`, which the caller gave as an input.
  void note_input(const at::Tensor& tensor) {
    if (seen) {
      inputs.push_back(tensor);
    }
  }
  // A contiguous tensor with the values of `tensor`; kept alive.
  at::Tensor readable(const at::Tensor& tensor);
  // A contiguous tensor whose values reach `tensor` by `write_back`; kept alive. No two share memory: where outputs do, all get their
  // values, one after the other, so that the last one stands.
  at::Tensor writable(const at::Tensor& tensor, bool keep_values);
  void write_back();
  // What `begin`, a function of the core, makes of the collectives. It begins none while inputs share memory with an output of this or an
  // earlier collective other than the very one that replaces them: these are copied first, so that each is what it was before the call.
  template <typename Begin>
  Outcome begin_with(Begin begin) {
    while (true) {
      const auto calls = specs();
      auto outcome = begin(rust::Slice<const CallSpec>(calls.data(), calls.size()));
      if (outcome.asides.empty()) {
        return outcome;
      }
      for (const auto& aside : outcome.asides) {
        copy_aside(this->calls[aside.call].inputs[aside.input]);
      }
    }
  }

  // The collectives as the core takes them, with the spans of `calls`, after those of `specs`.
  void add_specs(CallSpecs& specs) const;
  CallSpecs specs() const {
    CallSpecs all;
    add_specs(all);
    return all;
  }

  // Lets go of all tensors but the outputs.
  void release_inputs();
  // The results in the shape of Gloo's futures: one list, or several if `nested`.
  std::vector<std::vector<at::Tensor>> results() const;
  bool nested() const {
    return lists.size() > 1 || (coalesced && parts > 1);
  }
  // Name of the call in messages: "all_reduce".
  std::string name() const;
  // Every tensor that the call reads or writes, some of them twice.
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
  // A profiler listens to the thread that makes the call.
  const bool seen = profiled();
  // Device of all tensors; none: there are none yet.
  std::optional<at::Device> device;
  c10::SmallVector<PreparedCall, 1> calls;
  // The caller's input tensors, for a profiler; empty where none listens.
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  // Splits of an all-to-all, for profilers.
  std::vector<int64_t> input_splits;
  std::vector<int64_t> output_splits;
  // The output lists of a call that takes lists; empty: the call has none.
  std::vector<std::vector<at::Tensor>> lists;
  // Number of ranks whose parts make up each output; 0: an output is one result.
  int64_t parts = 0;
  // True if the call gathers into several tensors at once: then each rank's parts are one list.
  bool coalesced = false;

 private:
  void check(const at::Tensor& tensor, const char* role);
  // Replaces `input` by a copy of what is there now.
  void copy_aside(Span& input);
  // Adds the memory of `tensor` to what is written; whether some of it was there before.
  bool meets_written(const at::Tensor& tensor);

  c10::SmallVector<at::Tensor, 2> alive_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pending_;
  // Outputs: apart from each other, in the order of addresses.
  c10::SmallVector<Span, 2> written_;
};

Span span_of(const at::Tensor& contiguous);
// Fails unless the memory of `output`, a tensor on the CPU, may be written. Only memory that torch did not allocate is looked at, and the
// storage of the last call of this thread is not looked at again.
void check_writable(const at::Tensor& output, const char* op);

} // namespace symm
