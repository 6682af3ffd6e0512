// An all-gather whose shards are multiplied as they arrive.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "errors.hpp"
#include "fused/fused.hpp"
#include "symm_mem/symm_ops.hpp"

namespace symm {

namespace {

constexpr const char* kOp = "all_gather_matmul";

// Products of a matrix all of whose rows are there already.
std::vector<at::Tensor> products(const at::Tensor& left, at::TensorList factors) {
  std::vector<at::Tensor> found;
  for (const auto& factor : factors) {
    found.push_back(at::mm(left, factor));
  }
  return found;
}

// One call: everything is enqueued when it has been made.
class GatherCall {
 public:
  GatherCall(Workspace& workspace, const at::Tensor& shard, at::TensorList factors)
      : workspace_(workspace), lanes_(workspace.lanes), shard_(shard), factors_(factors), rows_(shard.size(0)) {
    const auto all_rows = times(kOp, workspace.size(), rows_);
    int64_t columns = 0;
    for (const auto& factor : factors) {
      // torch refuses a matrix of more elements than can be counted: so many columns cannot add up to more, either.
      columns += factor.size(1);
      outputs_.push_back(at::empty({all_rows, factor.size(1)}, shard.options()));
    }
    gathered_ = at::empty({all_rows, shard.size(1)}, shard.options());
    plan_ = plan_gather(product_of(workspace, rows_, columns, shard.size(1), shard.scalar_type()));
    check(plan_.status);
  }

  void enqueue(const Turn& turn, bool own_rows_too) {
    share(turn);
    size_t next = 0;
    const auto count = plan_.products.size();
    // Copies go ahead of the products by one group, so that the host enqueues them before the link has nothing to do.
    auto arrived = pull(turn, count == 0 ? 0 : plan_.products[0].arrived);
    multiply(workspace_.rank(), 1, shard_);
    if (own_rows_too && plan_.own_early) {
      copy_own_rows();
    }
    while (next < count) {
      const auto of = plan_.products[next].arrived;
      lanes_.after(Lane::Main, arrived);
      const auto first = next;
      while (next < count && plan_.products[next].arrived == of) {
        ++next;
      }
      if (next < count) {
        arrived = pull(turn, plan_.products[next].arrived);
      }
      for (auto at = first; at < next; ++at) {
        const auto& run = plan_.products[at];
        multiply(run.first, run.count, rows(gathered_, run.first, run.count));
      }
    }
    if (own_rows_too && !plan_.own_early) {
      lanes_.on(Lane::Pull, [&] { copy_own_rows(); });
    }
  }

  at::Tensor gathered() const {
    return gathered_;
  }
  std::vector<at::Tensor> outputs() {
    return std::move(outputs_);
  }

 private:
  // Rows of shards `first` to `first + count`.
  at::Tensor rows(const at::Tensor& matrix, size_t first, size_t count) const {
    return matrix.narrow(0, static_cast<int64_t>(first) * rows_, static_cast<int64_t>(count) * rows_);
  }

  // Puts the own shard where peers read it, and waits for theirs.
  void share(const Turn& turn) {
    lanes_.after(Lane::Pull, lanes_.mark(Lane::Main));
    lanes_.on(Lane::Pull, [&] {
      if (turn.entry) {
        workspace_.barrier(Channel::Entry);
      }
      shard_on(workspace_.rank(), turn).copy_(shard_);
      workspace_.barrier(Channel::Ready);
    });
    // A product that fills the device would keep the barrier's kernel from running.
    lanes_.after(Lane::Main, lanes_.mark(Lane::Pull));
  }

  at::Tensor shard_on(int rank, const Turn& turn) const {
    return workspace_.matrix(rank, turn, 0, shard_.sizes(), shard_.scalar_type());
  }

  // Copies until the shards of so many peers are there.
  Lanes::Mark pull(const Turn& turn, size_t until) {
    lanes_.on(Lane::Pull, [&] {
      for (; pulled_ < until; ++pulled_) {
        const auto peer = static_cast<int>((workspace_.rank() + pulled_ + 1) % workspace_.size());
        rows(gathered_, peer, 1).copy_(shard_on(peer, turn));
      }
    });
    return lanes_.mark(Lane::Pull);
  }

  void copy_own_rows() const {
    rows(gathered_, workspace_.rank(), 1).copy_(shard_);
  }

  void multiply(size_t first, size_t count, const at::Tensor& left) {
    for (size_t at = 0; at < factors_.size(); ++at) {
      auto out = rows(outputs_[at], first, count);
      at::mm_out(out, left, factors_[at]);
    }
  }

  Workspace& workspace_;
  Lanes& lanes_;
  const at::Tensor& shard_;
  const at::TensorList factors_;
  const int64_t rows_;
  at::Tensor gathered_;
  std::vector<at::Tensor> outputs_;
  GatherPlan plan_;
  size_t pulled_ = 0;
};

} // namespace

std::tuple<at::Tensor, std::vector<at::Tensor>> all_gather_matmul(
    const at::Tensor& shard,
    at::TensorList factors,
    const std::string& group_name,
    bool return_gathered) {
  TORCH_CHECK_VALUE(!factors.empty(), kOp, ": Bs is empty");
  for (const auto& factor : factors) {
    check_factors(kOp, "A_shard", shard, "B", factor);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(shard.device());
  const auto workspace = Workspace::of(group_name, shard.device());
  const auto nothing = at::empty({0}, shard.options());
  if (workspace->size() == 1) {
    return {return_gathered ? shard.clone() : nothing, products(shard, factors)};
  }
  if (shard.numel() == 0) {
    const auto gathered = at::empty({times(kOp, workspace->size(), shard.size(0)), shard.size(1)}, shard.options());
    return {return_gathered ? gathered : nothing, products(gathered, factors)};
  }
  const std::lock_guard<std::mutex> turns(workspace->mutex);
  const auto turn = workspace->begin(shard.nbytes(), kOp);
  GatherCall call(*workspace, shard, factors);
  workspace->ended([&] { call.enqueue(turn, return_gathered); });
  return {return_gathered ? call.gathered() : nothing, call.outputs()};
}

} // namespace symm
