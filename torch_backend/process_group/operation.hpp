// Operation: one c10d call in preparation: its tensors, checked, as plain spans for the core.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

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

// Owns every tensor that the core reads or writes, all of one device. Tensors that are not contiguous are replaced by copies, and results
// are written back by `write_back`.
class Operation {
 public:
  // `title` is the profiling name "symm:<op>"; its tail names the call in messages.
  Operation(::c10d::OpType type, const char* title) : type(type), title(title) {}

  // Begins a collective; the spans that follow belong to it.
  CallSpec& begin(Collective op, const at::Tensor& like);
  // The reduce op of the current collective and its factor; refused here if it means nothing for the dtype.
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

  // A contiguous tensor with the values of `tensor`; kept alive.
  at::Tensor readable(const at::Tensor& tensor);
  // A contiguous tensor whose values reach `tensor` by `write_back`; kept alive. No two share memory: where outputs do, all get their
  // values, one after the other, so that the last one stands.
  at::Tensor writable(const at::Tensor& tensor, bool keep_values);
  void write_back();
  // Copies inputs that overlap an output of this or an earlier collective other than the very one that replaces them, which the core does
  // not serve: every input is what it was before the call.
  void separate(int rank);

  // Lets go of all tensors but the outputs.
  void release_inputs();
  // Name of the call in messages: "all_reduce".
  std::string name() const;
  // Every tensor that the call reads or writes, some of them twice.
  template <typename Visit>
  void for_each_tensor(Visit visit) const {
    for (const auto* list : {&inputs, &outputs, &alive_}) {
      for (const auto& tensor : *list) {
        visit(tensor);
      }
    }
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
  std::vector<CallSpec> calls;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  // Splits of an all-to-all, for profilers.
  std::vector<int64_t> input_splits;
  std::vector<int64_t> output_splits;
  // The output lists where the call had several; empty: one flat list.
  std::vector<std::vector<at::Tensor>> lists;

 private:
  void check(const at::Tensor& tensor, const char* role);
  // Replaces `input` by a copy of what is there now.
  void copy_aside(Span& input);
  // Adds the memory of `tensor` to what is written; whether some of it was there before.
  bool meets_written(const at::Tensor& tensor);

  std::vector<at::Tensor> alive_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pending_;
  // Outputs: apart from each other, in the order of addresses.
  std::vector<Span> written_;
};

Span span_of(const at::Tensor& contiguous);

} // namespace symm
