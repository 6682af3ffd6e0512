// An out-of-place all-reduce: its reductions and its group.
#include "fused/all_reduce.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>

#include "gil.hpp"
#include "process_group/arguments.hpp"
#include "process_group/process_group.hpp"

namespace symm {

namespace {

using ::c10d::ReduceOp;

constexpr const char* kAllReduce = "all_reduce";

ReduceOp::RedOpType reduction(const std::string& name) {
  static constexpr auto words = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  static constexpr std::array<ReduceOp::RedOpType, words.size()> codes{
      ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT, ReduceOp::MIN,
      ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BOR,     ReduceOp::BXOR};
  const auto* const found = std::find(words.begin(), words.end(), name);
  TORCH_CHECK_VALUE(found != words.end(), wrong_word(kAllReduce, "reduce_op", name, words));
  return codes[found - words.begin()];
}

} // namespace

at::Tensor all_reduce_shape(
    const at::Tensor& input, const std::string& reduce_op, const std::string& /*group_name*/) {
  reduction(reduce_op);
  return at::empty_symint(input.sym_sizes(), input.options());
}

at::Tensor all_reduce(
    const at::Tensor& input, const std::string& reduce_op, const std::string& group_name) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(input.device());
  const ReduceOp op(reduction(reduce_op));
  auto output = at::empty(input.sizes(), input.options());
  const auto backend = ProcessGroupSymm::named(group_name, input.device(), kAllReduce);
  without_gil([&] { backend->all_reduce_into(output, input, op); });
  return output;
}

} // namespace symm
