// Common parts of torch.ops.symm_mem operators on CPU tensors.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>
#include <type_traits>

#include "errors.hpp"
#include "gil.hpp"
#include "symm_mem/symmetric_window.hpp"

namespace symm {

using WindowPtr = c10::intrusive_ptr<SymmetricWindow>;

// Returns the window of the tensor's memory in the group; collective if the group has none yet.
// Null if the memory is not symmetric.
WindowPtr find_window(const at::Tensor& tensor, const std::string& group_name);
// Returns the window of `tensor`; rejects memory that is not symmetric, with an error that names
// `op` and the argument `what`.
WindowPtr window_of(
    const at::Tensor& tensor, const std::string& group_name, const char* op,
    const char* what = "input");

// Returns the product of the non-negative a and b; throws if no tensor can have that many elements.
int64_t times(const char* op, int64_t a, int64_t b);

// Returns the tensor's dtype for the core.
int32_t dtype_of(const at::Tensor& tensor);

// Notifies the ranks that wait for this rank in an operator on CPU tensors that this rank has
// rejected its arguments because of `reason`. Has no effect if the group has not been joined.
void reject_operator(const std::string& group_name, const std::string& reason);

// Returns once all ranks of the group have called it; throws on all ranks if their `call`s, which
// describe an operator on CPU tensors, differ. Joins the group if necessary.
void compare_operators(const std::string& group_name, const std::string& call);

// Rethrows the current exception. If the group has been joined, first notifies the ranks that wait
// for this rank in an operator that this rank has rejected its arguments.
[[noreturn]] void refused(const std::string& group_name);

// Returns the result of `arguments`, the part of an operator before its first barrier. If that
// throws, the ranks that wait for this one are notified.
template <typename Arguments>
auto check_arguments(const std::string& group_name, Arguments arguments) {
  try {
    return arguments();
  } catch (...) {
    refused(group_name);
  }
}

// Runs a `collective` of the core on the window.
template <typename Collective>
void run_on(const SymmetricWindow& window, Collective collective) {
  check(without_gil([&] { return collective(window.handle()); }));
}

// `Kernel` as the dispatcher calls it, with values on a stack. torch does not compare the C++ types
// of a kernel in this form with those of another library's CUDA kernel of the same operator. Those
// types differ between versions of torch; if they were compared and differed, torch would reject
// the kernel, and the extension would fail to load.
template <auto Kernel>
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  using Pointer = c10::CompileTimeFunctionPointer<std::remove_pointer_t<decltype(Kernel)>, Kernel>;
  using Functor = typename c10::impl::WrapFunctionIntoFunctor<Pointer>::type;
  Functor functor;
  c10::impl::make_boxed_from_unboxed_functor<Functor, /*AllowDeprecatedTypes=*/false>::call(
      &functor, op, keys, stack);
}

template <auto Kernel>
void add(torch::Library& library, const char* name) {
  library.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed<Kernel>>());
}

// Adds the operators of one file. Called by name, because the linker drops registrations that
// nothing refers to.
void add_reductions(torch::Library& library);
void add_exchanges(torch::Library& library);

} // namespace symm
