// Collectives on lists of tensors. As in collectives.cpp, waiting ranks are notified of rejected
// calls.
#include "process_group/process_group.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>

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

// Gathers each rank's number of entries, then all indices and values, and sums them by coalescing
// in rank order.
ProcessGroupSymm::WorkPtr ProcessGroupSymm::sum_sparse(
    const at::Tensor& tensor, const ::c10d::AllreduceOptions& opts) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      opts.reduceOp == ::c10d::ReduceOp::SUM,
      "ProcessGroupSymm::allreduce: sparse tensors can only be reduced with ReduceOp.SUM; use "
      "to_dense() for the others");
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.device().is_cpu(), "ProcessGroupSymm::allreduce: the sparse tensor is on ",
      tensor.device(), ", backend symm serves sparse tensors on CPU only");
  const at::AutoDispatchBelowADInplaceOrView plain;
  const auto own = tensor.coalesce();
  ::c10d::AllgatherOptions sync;
  sync.timeout = opts.timeout;
  sync.asyncOp = false;
  const auto gathered = [&](const at::Tensor& mine, const std::vector<int64_t>& rows) {
    TensorLists all(1);
    for (const auto count : rows) {
      auto sizes = mine.sizes().vec();
      sizes[0] = count;
      all[0].push_back(at::empty(sizes, mine.options()));
    }
    Tensors inputs{mine.contiguous()};
    allgather(all, inputs, sync);
    return all[0];
  };
  // Each rank's number of entries, of sparse dimensions and of all dimensions, then the sizes. The
  // length is the same on all ranks, so all ranks raise the same error if the sizes differ.
  constexpr int64_t kSizes = 3;
  constexpr int64_t kMostDimensions = 64;
  std::vector<int64_t> header{own._nnz(), own.sparse_dim(), own.dim()};
  header.insert(header.end(), own.sizes().begin(), own.sizes().end());
  TORCH_CHECK_NOT_IMPLEMENTED(
      own.dim() <= kMostDimensions,
      "ProcessGroupSymm::allreduce: a sparse tensor may have at most ", kMostDimensions,
      " dimensions");
  header.resize(kSizes + kMostDimensions);
  const auto length = static_cast<int64_t>(header.size());
  const auto headers =
      gathered(at::tensor(header, at::kLong), std::vector<int64_t>(getSize(), length));
  const auto described = [](const at::Tensor& shown) {
    const auto* words = shown.const_data_ptr<int64_t>();
    return c10::str(at::IntArrayRef(words + kSizes, words[2]), " (", words[1], " sparse)");
  };
  std::vector<int64_t> counts;
  for (const auto& other : headers) {
    counts.push_back(other[0].item<int64_t>());
    TORCH_CHECK_VALUE(
        other.slice(0, 1).equal(headers[0].slice(0, 1)),
        "ProcessGroupSymm::allreduce: Tensor dimensions do not match: ",
        described(headers[0]), " on rank 0, ", described(other), " on rank ", counts.size() - 1);
  }
  const auto indices = gathered(own._indices().t(), counts);
  const auto values = gathered(own._values(), counts);
  const auto sum =
      at::sparse_coo_tensor(at::cat(indices).t(), at::cat(values), tensor.sizes(), tensor.options())
          .coalesce();
  tensor.copy_(sum);
  auto operation = std::make_shared<Operation>(OpType::ALLREDUCE, "symm:sparse_all_reduce");
  operation->outputs.push_back(tensor);
  return completed(operation);
}

} // namespace symm
