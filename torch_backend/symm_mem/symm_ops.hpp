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

// The window of the tensor's memory in the group; collective if the group has none yet. Null if the memory is not symmetric.
WindowPtr find_window(const at::Tensor& tensor, const std::string& group_name);
// Window of `tensor`; refuses memory that is not symmetric: it is `op` that wants it, as its `what`.
WindowPtr window_of(const at::Tensor& tensor, const std::string& group_name, const char* op, const char* what = "input");

// Product of a and b, of which neither is negative; refused if no tensor can have so many elements.
int64_t times(const char* op, int64_t a, int64_t b);

// The tensor's dtype, as the core reads it.
int32_t dtype_of(const at::Tensor& tensor);

// Tells the ranks that wait for this one in an operator of the group, if it has been joined, that it has refused its arguments, and rethrows
// what is being handled.
[[noreturn]] void refused(const std::string& group_name);

// What `arguments` returns: what an operator does before its first barrier. What that throws is told to the ranks that wait for this one.
template <typename Arguments>
auto check_arguments(const std::string& group_name, Arguments arguments) {
  try {
    return arguments();
  } catch (...) {
    refused(group_name);
  }
}

// Runs `collective` of the core on the window.
template <typename Collective>
void run_on(const SymmetricWindow& window, Collective collective) {
  check(without_gil([&] { return collective(window.handle()); }));
}

// `Kernel` as the dispatcher calls it with values on a stack. Registered so, its C++ types need not be those of the kernel that another
// library has for CUDA, which differ between versions of torch; a kernel with other types is refused, and with it the extension.
template <auto Kernel>
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  using Pointer = c10::CompileTimeFunctionPointer<std::remove_pointer_t<decltype(Kernel)>, Kernel>;
  using Functor = typename c10::impl::WrapFunctionIntoFunctor<Pointer>::type;
  Functor functor;
  c10::impl::make_boxed_from_unboxed_functor<Functor, /*AllowDeprecatedTypes=*/false>::call(&functor, op, keys, stack);
}

template <auto Kernel>
void add(torch::Library& library, const char* name) {
  library.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed<Kernel>>());
}

// Adds the operators of one file. Called by name: a linker takes no notice of a registration that nobody refers to.
void add_reductions(torch::Library& library);
void add_exchanges(torch::Library& library);

} // namespace symm
