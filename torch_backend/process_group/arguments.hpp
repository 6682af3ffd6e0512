// Checks that come before anything is exchanged; messages as torch's tests expect them (c10d/Utils.hpp).
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace symm {

// The single tensor of a list.
const at::Tensor& single(const char* call, const std::vector<at::Tensor>& tensors);
// The single list of a list of lists, of `size` tensors.
const std::vector<at::Tensor>& single_list(
    const char* call,
    const char* role,
    const std::vector<std::vector<at::Tensor>>& lists,
    int size);
void check_root(const char* call, int64_t root, int64_t tensor, int size);
// Checks that all tensors are of the dtype and device of `like`, and of its sizes if `sizes`.
void check_like(const char* call, const std::vector<at::Tensor>& tensors, const at::Tensor& like, bool sizes);
// `whole` (the `whole_role` tensor) holds `parts` times as many elements as `part`, of the same dtype.
void check_parts(
    const char* call,
    const char* whole_role,
    const at::Tensor& whole,
    const char* part_role,
    const at::Tensor& part,
    int parts);
// The elements of each of `size` consecutive pieces of the `role` tensor, whose rows `splits` deals out; none: evenly.
std::vector<int64_t> split_lengths(
    const char* call,
    const char* role,
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    int size);

} // namespace symm
