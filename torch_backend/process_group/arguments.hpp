// Checks before any exchange; the messages are those that torch's tests expect (c10d/Utils.hpp).
#pragma once

#include <ATen/ATen.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace symm {

// Returns the single tensor of a list.
const at::Tensor& single(const char* call, const std::vector<at::Tensor>& tensors);
// Returns the single list in a list of lists, which must have `size` tensors.
const std::vector<at::Tensor>& single_list(
    const char* call,
    const char* role,
    const std::vector<std::vector<at::Tensor>>& lists,
    int size);
void check_root(const char* call, int64_t root, int64_t tensor, int size);
// Checks that all tensors have the dtype and device of `like` and, if `sizes` is true, its sizes.
void check_like(
    const char* call, const std::vector<at::Tensor>& tensors, const at::Tensor& like, bool sizes);
// Checks that `whole` (the `whole_role` tensor) has `parts` times as many elements as `part`, and
// the same dtype.
void check_parts(
    const char* call,
    const char* whole_role,
    const at::Tensor& whole,
    const char* part_role,
    const at::Tensor& part,
    int parts);
// Returns the error of an argument that must be one of `words`:
// `all_reduce: reduce_op="summ" is not one of "sum", "max"`.
std::string wrong_word(
    const char* call,
    const char* argument,
    const std::string& value,
    std::initializer_list<const char*> words);
// Returns the number of elements of each of `size` consecutive pieces of the `role` tensor.
// `splits` has the number of rows of each piece; if it is empty, all pieces are equal.
std::vector<int64_t> split_lengths(
    const char* call,
    const char* role,
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    int size);

} // namespace symm
