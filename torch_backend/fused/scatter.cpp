// A product whose rows are summed over all ranks, each row by the rank that owns it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "errors.hpp"
#include "fused/fused.hpp"
#include "symm_mem/operators.hpp"

namespace symm {

namespace {

constexpr const char* kScatterOp = "matmul_reduce_scatter";
// A piece of the workspace holds this rank's part for each rank, in rank order.
class ScatterCall final : public FusedOperator {
 public:
  ScatterCall(
      const Workspace& workspace, const at::Tensor& left, const at::Tensor& right, bool mean)
      : workspace_(workspace),
        left_(left),
        right_(right),
        mean_(mean),
        me_(workspace.rank()),
        n_(workspace.size()),
        rows_(left.size(0) / n_),
        out_(at::empty({rows_, right.size(1)}, left.options())) {}

  FusedCall begin(FusedWorkspace& core, uint64_t capture) override {
    return core.scatter(
        product_of(workspace_, rows_, right_.size(1), left_.size(1), left_.scalar_type()), capture);
  }

  void prepare(const FusedCall& call) override {
    call_ = &call;
    const auto fetched = std::count_if(
        call.steps.begin(), call.steps.end(),
        [](const FusedStep& step) { return step.action == FusedAction::Fetch; });
    copies_ = at::empty(
        {fetched, static_cast<int64_t>(call.part_bytes / left_.element_size())}, left_.options());
    parts_.resize(n_);
    for (int rank = 0; rank < n_; ++rank) {
      parts_[rank] = part(rank, me_);
    }
  }

  void enqueue(const FusedStep& step) override {
    switch (step.action) {
      case FusedAction::Multiply: {
        auto out = part(me_, step.rank);
        at::mm_out(out, left_.narrow(0, static_cast<int64_t>(step.rank) * rows_, rows_), right_);
        return;
      }
      case FusedAction::Fetch: {
        auto copy = copies_[fetched_++].narrow(0, 0, out_.numel()).view(out_.sizes());
        copy.copy_(parts_[step.rank]);
        parts_[step.rank] = std::move(copy);
        return;
      }
      case FusedAction::Sum:
        sum();
        return;
      case FusedAction::Mark:
      case FusedAction::After:
      case FusedAction::Barrier:
      case FusedAction::Signal:
      case FusedAction::Wait:
      case FusedAction::Share:
      case FusedAction::OwnRows:
        TORCH_INTERNAL_ASSERT(false, kScatterOp, " has no such step");
    }
  }

  at::Tensor out() const {
    return out_;
  }

 private:
  // Returns the part that `rank` has computed for rank `of`.
  at::Tensor part(size_t rank, size_t of) const {
    return workspace_.matrix(
        rank, *call_, of * call_->part_bytes, out_.sizes(), out_.scalar_type());
  }

  void sum() const {
    SumSpec spec{};
    spec.device = number_of(out_.device());
    spec.stream = workspace_.stream();
    spec.rank = static_cast<size_t>(me_);
    for (const auto& part : parts_) {
      spec.parts.push_back(reinterpret_cast<size_t>(part.const_data_ptr()));
    }
    spec.to = reinterpret_cast<size_t>(out_.mutable_data_ptr());
    spec.bytes = out_.nbytes();
    spec.dtype = static_cast<int32_t>(out_.scalar_type());
    spec.mean = mean_;
    check(sum_parts(spec));
  }

  const Workspace& workspace_;
  const at::Tensor& left_;
  const at::Tensor& right_;
  const bool mean_;
  const int me_;
  const int n_;
  const int64_t rows_;
  const at::Tensor out_;
  const FusedCall* call_ = nullptr;
  at::Tensor copies_;
  int64_t fetched_ = 0;
  // The part that each rank has computed for this one: in the rank's own memory, or a copy.
  std::vector<at::Tensor> parts_;
};

} // namespace

at::Tensor matmul_reduce_scatter(
    const at::Tensor& left, const at::Tensor& right, bool mean, const std::string& group_name) {
  check_on(
      left.device(), group_name, [&] { check_factors(kScatterOp, "A", left, "B", right); });
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(left.device());
  const auto workspace = Workspace::of(group_name, left.device());
  const auto n = workspace->size();
  check_on(left.device(), group_name, [&] {
    TORCH_CHECK_VALUE(
        left.size(0) % n == 0, kScatterOp, ": the ", left.size(0),
        " rows of A cannot be divided among ", n, " ranks; the number of rows must be a multiple");
  });
  if (n == 1) {
    return at::mm(left, right);
  }
  if (left.size(0) == 0 || right.size(1) == 0) {
    return at::empty({left.size(0) / n, right.size(1)}, left.options());
  }
  ScatterCall call(*workspace, left, right, mean);
  workspace->run(call);
  return call.out();
}

} // namespace symm
