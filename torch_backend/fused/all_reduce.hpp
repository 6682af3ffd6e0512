// An all-reduce out of place, as an operator of torch: torch.ops.symm.all_reduce.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace symm {

// `input` reduced over the ranks of the group by `reduce_op`, named as functional collectives name it; `input` is only read. The current
// stream waits for it, and the host where there is none.
at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op, const std::string& group_name);

// What it returns for a tensor without memory.
at::Tensor all_reduce_shape(const at::Tensor& input, const std::string& reduce_op, const std::string& group_name);

} // namespace symm
