// An all-gather whose shards are multiplied as they arrive.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "errors.hpp"
#include "fused/fused.hpp"
#include "symm_mem/operators.hpp"

namespace symm {

namespace {

constexpr const char* kOp = "all_gather_matmul";

// Returns the products of a matrix whose rows are all available.
std::vector<at::Tensor> products(const at::Tensor& left, at::TensorList factors) {
  std::vector<at::Tensor> found;
  for (const auto& factor : factors) {
    found.push_back(at::mm(left, factor));
  }
  return found;
}

class GatherCall final : public FusedOperator {
 public:
  GatherCall(
      const Workspace& workspace, const at::Tensor& shard, at::TensorList factors, bool own_rows)
      : workspace_(workspace),
        shard_(shard),
        factors_(factors),
        rows_(shard.size(0)),
        own_rows_(own_rows) {
    const auto all_rows = times(kOp, workspace.size(), rows_);
    for (const auto& factor : factors) {
      // Cannot overflow: torch rejects matrices whose elements cannot be counted.
      columns_ += factor.size(1);
      outputs_.push_back(at::empty({all_rows, factor.size(1)}, shard.options()));
    }
    gathered_ = at::empty({all_rows, shard.size(1)}, shard.options());
  }

  FusedCall begin(FusedWorkspace& core, uint64_t capture) override {
    return core.gather(
        product_of(workspace_, rows_, columns_, shard_.size(1), shard_.scalar_type()), own_rows_,
        capture);
  }

  void prepare(const FusedCall& call) override {
    call_ = &call;
  }

  void enqueue(const FusedStep& step) override {
    const auto me = static_cast<size_t>(workspace_.rank());
    switch (step.action) {
      case FusedAction::Share:
        shard_on(me).copy_(shard_);
        return;
      case FusedAction::Fetch:
        rows(gathered_, step.rank, 1).copy_(shard_on(step.rank));
        return;
      case FusedAction::OwnRows:
        rows(gathered_, me, 1).copy_(shard_);
        return;
      case FusedAction::Multiply:
        // This rank's own rows need not be gathered.
        multiply(step, step.rank == me ? shard_ : rows(gathered_, step.rank, step.count));
        return;
      case FusedAction::Mark:
      case FusedAction::After:
      case FusedAction::Barrier:
      case FusedAction::Signal:
      case FusedAction::Wait:
      case FusedAction::Sum:
        TORCH_INTERNAL_ASSERT(false, kOp, " has no such step");
    }
  }

  at::Tensor gathered() const {
    return gathered_;
  }
  std::vector<at::Tensor> outputs() {
    return std::move(outputs_);
  }

 private:
  // Returns the rows of `count` shards from shard `first` on.
  at::Tensor rows(const at::Tensor& matrix, size_t first, size_t count) const {
    return matrix.narrow(
        0, static_cast<int64_t>(first) * rows_, static_cast<int64_t>(count) * rows_);
  }

  at::Tensor shard_on(size_t rank) const {
    return workspace_.matrix(rank, *call_, 0, shard_.sizes(), shard_.scalar_type());
  }

  void multiply(const FusedStep& step, const at::Tensor& left) {
    for (size_t at = 0; at < factors_.size(); ++at) {
      auto out = rows(outputs_[at], step.rank, step.count);
      at::mm_out(out, left, factors_[at]);
    }
  }

  const Workspace& workspace_;
  const at::Tensor& shard_;
  const at::TensorList factors_;
  const int64_t rows_;
  const bool own_rows_;
  int64_t columns_ = 0;
  at::Tensor gathered_;
  std::vector<at::Tensor> outputs_;
  const FusedCall* call_ = nullptr;
};

} // namespace

std::tuple<at::Tensor, std::vector<at::Tensor>> all_gather_matmul(
    const at::Tensor& shard,
    at::TensorList factors,
    const std::string& group_name,
    bool return_gathered) {
  check_on(shard.device(), group_name, [&] {
    TORCH_CHECK_VALUE(!factors.empty(), kOp, ": Bs is empty");
    for (const auto& factor : factors) {
      check_factors(kOp, "A_shard", shard, "B", factor);
    }
  });
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(shard.device());
  const auto workspace = Workspace::of(group_name, shard.device());
  const auto nothing = at::empty({0}, shard.options());
  if (workspace->size() == 1) {
    return {return_gathered ? shard.clone() : nothing, products(shard, factors)};
  }
  if (shard.numel() == 0) {
    const auto gathered =
        at::empty({times(kOp, workspace->size(), shard.size(0)), shard.size(1)}, shard.options());
    return {return_gathered ? gathered : nothing, products(gathered, factors)};
  }
  GatherCall call(*workspace, shard, factors, return_gathered);
  workspace->run(call);
  return {return_gathered ? call.gathered() : nothing, call.outputs()};
}

} // namespace symm
