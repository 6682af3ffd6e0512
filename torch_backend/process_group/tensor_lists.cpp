// Collectives on lists of tensors. As in collectives.cpp, waiting ranks are notified of rejected
// calls.
#include "process_group/process_group.hpp"

#include <algorithm>
#include <numeric>

#include "errors.hpp"
#include "process_group/arguments.hpp"

namespace symm {

using ::c10d::OpType;

ProcessGroupSymm::WorkPtr ProcessGroupSymm::allgather(
    TensorLists& outputs,
    Tensors& inputs,
    const ::c10d::AllgatherOptions& opts) try {
  TORCH_CHECK_VALUE(
      !inputs.empty(), "ProcessGroupSymm::allgather: requires non-empty input tensor list");
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(),
      "ProcessGroupSymm::allgather: requires input/output tensor lists to have the same length");
  const auto& input = single("allgather", inputs);
  const auto& list = outputs[0];
  TORCH_CHECK_VALUE(
      list.size() == static_cast<size_t>(getSize()),
      "ProcessGroupSymm::allgather: invalid output tensor list at index 0 (expected length ",
      getSize(), ", got ", list.size(), ")");
  check_like("allgather", list, input, false);
  // The entries of `list` may differ in size. This rank knows only the size of its own entry.
  const auto& own = list[getRank()];
  TORCH_CHECK_VALUE(
      own.numel() == input.numel(), "ProcessGroupSymm::allgather: invalid tensor size at index ",
      getRank(), " (expected ", input.sizes(), ", got ", own.sizes(), ")");
  auto operation = std::make_shared<Operation>(OpType::ALLGATHER, "symm:all_gather");
  operation->begin(Collective::AllGather, input);
  operation->add_input(input);
  for (const auto& output : list) {
    operation->add_output(output);
  }
  operation->lists = outputs;
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::allgather_coalesced(
    TensorLists& outputs,
    Tensors& inputs,
    const ::c10d::AllgatherOptions& opts) try {
  TORCH_CHECK_VALUE(
      !inputs.empty(),
      "ProcessGroupSymm::allgather_coalesced: requires non-empty input tensor list");
  TORCH_CHECK_VALUE(
      outputs.size() == static_cast<size_t>(getSize()),
      "ProcessGroupSymm::allgather_coalesced: output lists should be equal to world size: ",
      outputs.size(), " lists, ", getSize(), " ranks");
  auto operation = std::make_shared<Operation>(OpType::ALLGATHER_COALESCED, "symm:all_gather");
  for (size_t i = 0; i < inputs.size(); ++i) {
    operation->begin(Collective::AllGather, inputs[i]);
    operation->add_input(inputs[i]);
    for (const auto& list : outputs) {
      TORCH_CHECK_VALUE(
          list.size() == inputs.size(),
          "ProcessGroupSymm::allgather_coalesced: invalid output size: ", list.size(),
          " output tensors, ", inputs.size(), " inputs");
      check_like("allgather_coalesced", {list[i]}, inputs[i], true);
      operation->add_output(list[i]);
    }
  }
  operation->lists = outputs;
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::gather(
    TensorLists& outputs,
    Tensors& inputs,
    const ::c10d::GatherOptions& opts) try {
  check_root("gather", opts.rootRank, 0, getSize());
  const auto& input = single("gather", inputs);
  auto operation = std::make_shared<Operation>(OpType::GATHER, "symm:gather");
  operation->begin(Collective::Gather, input).root = static_cast<int32_t>(opts.rootRank);
  operation->add_input(input);
  if (getRank() == opts.rootRank) {
    const auto& list = single_list("gather", "output", outputs, getSize());
    check_like("gather", list, input, true);
    for (const auto& output : list) {
      operation->add_output(output);
    }
    operation->lists = outputs;
  } else {
    TORCH_CHECK_VALUE(
        outputs.empty(), "ProcessGroupSymm::gather: requires empty output on non-root");
  }
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::scatter(
    Tensors& outputs,
    TensorLists& inputs,
    const ::c10d::ScatterOptions& opts) try {
  check_root("scatter", opts.rootRank, 0, getSize());
  const auto& output = single("scatter", outputs);
  auto operation = std::make_shared<Operation>(OpType::SCATTER, "symm:scatter");
  operation->begin(Collective::Scatter, output).root = static_cast<int32_t>(opts.rootRank);
  if (getRank() == opts.rootRank) {
    const auto& list = single_list("scatter", "input", inputs, getSize());
    check_like("scatter", list, output, true);
    for (const auto& input : list) {
      operation->add_input(input);
    }
  } else {
    TORCH_CHECK_VALUE(
        inputs.empty(), "ProcessGroupSymm::scatter: requires empty input on non-root");
  }
  operation->add_output(output);
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::reduce_scatter(
    Tensors& outputs,
    TensorLists& inputs,
    const ::c10d::ReduceScatterOptions& opts) try {
  const auto& output = single("reduce_scatter", outputs);
  const auto& list = single_list("reduce_scatter", "input", inputs, getSize());
  check_like("reduce_scatter", list, output, false);
  TORCH_CHECK_VALUE(
      list[getRank()].numel() == output.numel(),
      "ProcessGroupSymm::reduce_scatter: the output tensor has ", output.numel(),
      " elements, the input for this rank (", getRank(), ") has ", list[getRank()].numel());
  auto operation = std::make_shared<Operation>(OpType::REDUCE_SCATTER, "symm:reduce_scatter");
  operation->begin(Collective::ReduceScatter, output);
  operation->reduce_with(opts.reduceOp);
  for (const auto& input : list) {
    operation->add_input(input);
  }
  operation->add_output(output);
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::alltoall(
    Tensors& outputs,
    Tensors& inputs,
    const ::c10d::AllToAllOptions& opts) try {
  const auto size = static_cast<size_t>(getSize());
  TORCH_CHECK_VALUE(
      inputs.size() == size && outputs.size() == size,
      "ProcessGroupSymm::alltoall: ", inputs.size(), " input tensors and ", outputs.size(),
      " output tensors for ", size, " ranks");
  check_like("alltoall", inputs, inputs[0], false);
  check_like("alltoall", outputs, inputs[0], false);
  auto operation = std::make_shared<Operation>(OpType::ALLTOALL, "symm:all_to_all");
  operation->begin(Collective::AllToAll, inputs[0]);
  for (const auto& input : inputs) {
    operation->add_input(input);
  }
  for (const auto& output : outputs) {
    operation->add_output(output);
  }
  return launch(operation, opts.timeout, opts.asyncOp);
} catch (...) {
  refused();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::allreduce_sparse(
    Tensors& tensors, const ::c10d::AllreduceOptions& opts) try {
  const auto& tensor = single("allreduce_sparse", tensors);
  TORCH_CHECK_VALUE(
      tensor.is_sparse(),
      "ProcessGroupSymm::allreduce_sparse: the tensor is not in sparse COO layout");
  return sum_sparse(tensor, opts);
} catch (...) {
  refused();
}

namespace {

// The sum of sparse tensors. The ranks first gather the shapes and numbers of entries; in the same
// turn, all indices and values, which they sum by coalescing in rank order.
struct SparseSum {
  // The number of entries, of sparse dimensions and of all dimensions; then the sizes. Its length
  // is the same on all ranks, so all ranks raise the same error if the shapes differ.
  static constexpr int64_t kSizes = 3;
  static constexpr int64_t kMostDimensions = 64;
  static constexpr int64_t kHeader = kSizes + kMostDimensions;

  Group group;
  int64_t timeout_ms;
  uint32_t site;
  at::Tensor tensor;
  at::Tensor own;
  // A row for each rank.
  at::Tensor headers;
  // If `tensor` cannot be read, these values differ from those of all other ranks.
  at::Tensor header = at::full({kHeader}, -1, at::kLong);

  void fill_header() {
    own = tensor.coalesce();
    auto* words = header.mutable_data_ptr<int64_t>();
    words[0] = own._nnz();
    words[1] = own.sparse_dim();
    words[2] = own.dim();
    std::copy(own.sizes().begin(), own.sizes().end(), words + kSizes);
  }

  std::string described(int64_t rank) const {
    const auto* words = headers[rank].const_data_ptr<int64_t>();
    const at::IntArrayRef sizes(words + kSizes, std::max<int64_t>(words[2], 0));
    return c10::str(sizes, " (", words[1], " sparse) on rank ", rank);
  }

  // Gathers the entries of all ranks; rank r has `rows[r]` entries, this rank has `mine`.
  at::Tensor gathered(const at::Tensor& mine, const std::vector<int64_t>& rows) const {
    Operation gather(OpType::ALLGATHER, "symm:all_gather");
    at::Tensor all;
    try {
      gather.begin(Collective::AllGather, mine, site);
      gather.add_input(mine.contiguous());
      auto sizes = mine.sizes().vec();
      sizes[0] = std::accumulate(rows.begin(), rows.end(), int64_t{0});
      all = at::empty(sizes, mine.options());
      for (const auto& part : all.split_with_sizes(rows)) {
        gather.add_output(part);
      }
    } catch (...) {
      (*group)->reject(status_of(std::current_exception()).message);
      throw;
    }
    const auto run = [&](auto calls) { return (*group)->run_in_turn(calls, timeout_ms); };
    check(gather.begin_with(run).status);
    return all;
  }

  void finish() const {
    const auto shapes = headers.slice(1, 1);
    int64_t differs = 0;
    for (int64_t rank = 1; rank < headers.size(0) && differs == 0; ++rank) {
      differs = shapes[rank].equal(shapes[0]) ? 0 : rank;
    }
    if (differs != 0 || !own.defined()) {
      // All ranks make the later calls, because they were counted when the sum was queued.
      const auto nothing = at::empty({0}, at::kLong);
      gathered(nothing, std::vector<int64_t>(headers.size(0)));
      gathered(nothing, std::vector<int64_t>(headers.size(0)));
      TORCH_CHECK_VALUE(
          differs == 0, "ProcessGroupSymm::allreduce: Tensor dimensions do not match: ",
          described(0), ", ", described(differs));
      return;
    }
    const auto column = headers.select(1, 0).contiguous();
    const auto* counts = column.const_data_ptr<int64_t>();
    const std::vector<int64_t> rows(counts, counts + column.numel());
    const auto indices = gathered(own._indices().t(), rows);
    const auto values = gathered(own._values(), rows);
    tensor.copy_(
        at::sparse_coo_tensor(indices.t(), values, tensor.sizes(), tensor.options()).coalesce());
  }
};

} // namespace

ProcessGroupSymm::WorkPtr ProcessGroupSymm::sum_sparse(
    const at::Tensor& tensor, const ::c10d::AllreduceOptions& opts) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      opts.reduceOp == ::c10d::ReduceOp::SUM,
      "ProcessGroupSymm::allreduce: sparse tensors can only be reduced with ReduceOp.SUM; use "
      "to_dense() for the others");
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.device().is_cpu(), "ProcessGroupSymm::allreduce: the sparse tensor is on ",
      tensor.device(), ", backend symm serves sparse tensors on CPU only");
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.dim() <= SparseSum::kMostDimensions,
      "ProcessGroupSymm::allreduce: a sparse tensor may have at most ", SparseSum::kMostDimensions,
      " dimensions");
  const auto sum = std::make_shared<SparseSum>();
  sum->group = group_;
  sum->timeout_ms = extended(opts.timeout).count();
  sum->tensor = tensor;
  sum->headers = at::empty({getSize(), SparseSum::kHeader}, at::kLong);
  auto operation = std::make_shared<Operation>(OpType::ALLREDUCE, "symm:sparse_all_reduce");
  sum->site = operation->begin(Collective::AllGather, sum->header).call_site;
  operation->add_input(sum->header);
  for (const auto& row : sum->headers.unbind()) {
    operation->calls.back().outputs.push_back(span_of(operation->writable(row, false)));
  }
  operation->outputs.push_back(tensor);
  operation->steps = {[sum] { sum->fill_header(); }, [sum] { sum->finish(); }, 2};
  return launch(operation, opts.timeout, opts.asyncOp);
}

} // namespace symm
