// An out-of-place all-reduce as a torch operator: torch.ops.symm.all_reduce.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace symm {

// Returns `input` reduced over the ranks of the group by `reduce_op`, which has the names of
// functional collectives; `input` is only read. The current stream waits for the result; for CPU
// tensors, the host does.
at::Tensor all_reduce(
    const at::Tensor& input, const std::string& reduce_op, const std::string& group_name);

// Returns the output for a tensor without memory.
at::Tensor all_reduce_shape(
    const at::Tensor& input, const std::string& reduce_op, const std::string& group_name);

} // namespace symm
