#include "process_group/arguments.hpp"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

namespace symm {

namespace {

auto refuse(const char* call) {
  return [call](const std::string& message) {
    TORCH_CHECK_VALUE(false, "ProcessGroupSymm::", call, ": ", message);
  };
}

} // namespace

const at::Tensor& single(const char* call, const std::vector<at::Tensor>& tensors) {
  ::c10d::assertNonEmpty(refuse(call), tensors);
  ::c10d::assertSingleElement(refuse(call), tensors);
  TORCH_CHECK_VALUE(tensors[0].defined(), "ProcessGroupSymm::", call, ": the tensor is undefined");
  return tensors[0];
}

const std::vector<at::Tensor>& single_list(
    const char* call,
    const char* role,
    const std::vector<std::vector<at::Tensor>>& lists,
    int size) {
  if (lists.size() != 1) {
    refuse(call)(std::string("requires a single-element ") + role + " list");
  }
  if (lists[0].size() != static_cast<size_t>(size)) {
    refuse(call)(
        std::string("Incorrect ") + role + " list size " + std::to_string(lists[0].size()) + ". " +
        role + " list size should be " + std::to_string(size) +
        ", same as size of the process group.");
  }
  return lists[0];
}

void check_root(const char* call, int64_t root, int64_t tensor, int size) {
  ::c10d::assertRootRank(refuse(call), root, size);
  ::c10d::assertRootTensor(refuse(call), tensor, 1);
}

void check_like(
    const char* call, const std::vector<at::Tensor>& tensors, const at::Tensor& like, bool sizes) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(
        tensors[i].defined(), "ProcessGroupSymm::", call, ": the tensor at index ", i,
        " is undefined");
    ::c10d::assertTypeMatch(refuse(call), like.options(), tensors, i);
    if (sizes) {
      ::c10d::assertSizesMatch(refuse(call), like.sizes(), tensors, i);
    }
  }
}

void check_parts(
    const char* call,
    const char* whole_role,
    const at::Tensor& whole,
    const char* part_role,
    const at::Tensor& part,
    int parts) {
  TORCH_CHECK_VALUE(
      whole.defined() && part.defined(), "ProcessGroupSymm::", call, ": a tensor is undefined");
  TORCH_CHECK_TYPE(
      whole.scalar_type() == part.scalar_type(), "ProcessGroupSymm::", call, ": ", whole_role,
      " tensor must have the same type as ", part_role, " tensor, got ", whole.scalar_type(),
      " and ", part.scalar_type());
  TORCH_CHECK_VALUE(
      whole.numel() % parts == 0 && whole.numel() / parts == part.numel(),
      "ProcessGroupSymm::", call, ": ", whole_role,
      " tensor size must be equal to world_size times ", part_role, " tensor size, got ",
      whole.numel(), " elements for ", parts, " ranks of ", part.numel());
}

std::string wrong_word(
    const char* call,
    const char* argument,
    const std::string& value,
    std::initializer_list<const char*> words) {
  auto text = c10::str(
      call, ": ", argument, "=\"", value, "\" is not ", words.size() > 1 ? "one of " : "");
  const char* separator = "\"";
  for (const auto* word : words) {
    text += c10::str(separator, word, "\"");
    separator = ", \"";
  }
  return text;
}

std::vector<int64_t> split_lengths(
    const char* call,
    const char* role,
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    int size) {
  TORCH_CHECK_VALUE(
      tensor.defined() && tensor.dim() > 0, "ProcessGroupSymm::", call, ": the ", role,
      " tensor is a scalar and cannot be split");
  const auto rows = tensor.size(0);
  const auto row = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(
        rows % size == 0, "ProcessGroupSymm::", call,
        ": Tensor's dim 0 does not divide equally across group size: ", rows, " rows of the ", role,
        " tensor, ", size, " ranks");
    return std::vector<int64_t>(size, rows / size * row);
  }
  for (const auto split : splits) {
    TORCH_CHECK_VALUE(
        split >= 0, "ProcessGroupSymm::", call, ": ", role, " split size ", split, " is negative");
  }
  TORCH_CHECK_VALUE(
      splits.size() == static_cast<size_t>(size), "ProcessGroupSymm::", call,
      ": Number of tensor splits not equal to group size: ", splits.size(), " ", role,
      " splits for ", size, " ranks");
  // Subtracts from the number of rows, because a sum of the user's values could overflow.
  auto left = rows;
  std::vector<int64_t> lengths;
  for (const auto split : splits) {
    left = split <= left ? left - split : -1;
    if (left < 0) {
      break;
    }
    lengths.push_back(split * row);
  }
  TORCH_CHECK_VALUE(
      left == 0, "ProcessGroupSymm::", call, ": Split sizes doesn't match total dim 0 size: ", role,
      " splits are ", at::IntArrayRef(splits), ", dim 0 is ", rows);
  return lengths;
}

} // namespace symm
