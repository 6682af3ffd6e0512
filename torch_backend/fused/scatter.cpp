// A product whose rows are added up over all ranks, each by the rank that they belong to.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "errors.hpp"
#include "fused/fused.hpp"
#include "symm_mem/symm_ops.hpp"

namespace symm {

namespace {

constexpr const char* kScatterOp = "matmul_reduce_scatter";
// Parts begin at its multiples: what a copy engine and a kernel like.
constexpr size_t kAlignment = 256;

// One call: everything is enqueued when it has been made. A piece of the workspace holds this rank's part for each rank, in rank order.
class ScatterCall {
 public:
  ScatterCall(Workspace& workspace, const at::Tensor& left, const at::Tensor& right)
      : workspace_(workspace),
        lanes_(workspace.lanes),
        left_(left),
        right_(right),
        me_(workspace.rank()),
        n_(workspace.size()),
        rows_(left.size(0) / n_) {}

  // Bytes of one part, with what is left free behind it.
  static size_t part_bytes(const at::Tensor& left, const at::Tensor& right, int n) {
    const auto elements = times(kScatterOp, left.size(0) / n, right.size(1));
    const auto bytes = static_cast<size_t>(times(kScatterOp, elements, static_cast<int64_t>(left.element_size())));
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  at::Tensor enqueue(const Turn& turn, bool mean) {
    check(plan_scatter(product_of(workspace_, rows_, right_.size(1), left_.size(1), left_.scalar_type()), pulled_));
    const auto out = at::empty({rows_, right_.size(1)}, left_.options());
    const auto stride = static_cast<int64_t>(part_bytes(left_, right_, n_) / left_.element_size());
    const auto copies = at::empty({static_cast<int64_t>(pulled_), stride}, left_.options());
    std::vector<at::Tensor> parts(n_);
    // What is copied to may have been in use on this stream until now.
    lanes_.after(Lane::Pull, lanes_.mark(Lane::Main));
    if (turn.entry) {
      workspace_.barrier(Channel::Entry);
    }
    // The part of the next rank first, the own one last: at each step every rank computes for another one, and receives from another one.
    for (int step = 1; step < n_; ++step) {
      const auto to = (me_ + step) % n_, from = (me_ + n_ - step) % n_;
      multiply(turn, to);
      // On this lane: beside the next product it would wait for room, perhaps until that product's end.
      workspace_.put_signal(to, Channel::Part);
      lanes_.on(Lane::Pull, [&] {
        workspace_.wait_signal(from, Channel::Part);
        parts[from] = part(from, turn, me_);
        if (static_cast<size_t>(step) <= pulled_) {
          auto copy = copies[step - 1].narrow(0, 0, out.numel()).view(out.sizes());
          copy.copy_(parts[from]);
          parts[from] = std::move(copy);
        }
      });
    }
    multiply(turn, me_);
    parts[me_] = part(me_, turn, me_);
    lanes_.after(Lane::Main, lanes_.mark(Lane::Pull));
    sum(parts, out, mean);
    return out;
  }

 private:
  // Part that `rank` has computed for `of`.
  at::Tensor part(int rank, const Turn& turn, int of) const {
    const auto behind = static_cast<size_t>(of) * part_bytes(left_, right_, n_);
    return workspace_.matrix(rank, turn, behind, {rows_, right_.size(1)}, left_.scalar_type());
  }

  void multiply(const Turn& turn, int of) const {
    auto out = part(me_, turn, of);
    at::mm_out(out, left_.narrow(0, of * rows_, rows_), right_);
  }

  void sum(const std::vector<at::Tensor>& parts, at::Tensor out, bool mean) const {
    if (out.is_cpu()) {
      const auto wide = out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
      auto total = parts[0].to(wide, /*non_blocking=*/false, /*copy=*/true);
      for (int rank = 1; rank < n_; ++rank) {
        total.add_(parts[rank]);
      }
      if (mean) {
        total.div_(n_);
      }
      out.copy_(total);
      return;
    }
    SumSpec spec{};
    spec.device = static_cast<int32_t>(out.device().index());
    spec.stream = lanes_.handle();
    spec.rank = static_cast<size_t>(me_);
    for (const auto& part : parts) {
      spec.parts.push_back(reinterpret_cast<size_t>(part.const_data_ptr()));
    }
    spec.to = reinterpret_cast<size_t>(out.mutable_data_ptr());
    spec.bytes = out.nbytes();
    spec.dtype = static_cast<int32_t>(out.scalar_type());
    spec.mean = mean;
    check(sum_parts(spec));
  }

  Workspace& workspace_;
  Lanes& lanes_;
  const at::Tensor& left_;
  const at::Tensor& right_;
  const int me_;
  const int n_;
  const int64_t rows_;
  size_t pulled_ = 0;
};

} // namespace

at::Tensor matmul_reduce_scatter(const at::Tensor& left, const at::Tensor& right, bool mean, const std::string& group_name) {
  check_factors(kScatterOp, "A", left, "B", right);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(left.device());
  const auto workspace = Workspace::of(group_name, left.device());
  const auto n = workspace->size();
  TORCH_CHECK_VALUE(
      left.size(0) % n == 0, kScatterOp, ": the ", left.size(0), " rows of A cannot be divided among ", n, " ranks; the number of rows must be a multiple");
  if (n == 1) {
    return at::mm(left, right);
  }
  if (left.size(0) == 0 || right.size(1) == 0) {
    return at::empty({left.size(0) / n, right.size(1)}, left.options());
  }
  const std::lock_guard<std::mutex> turns(workspace->mutex);
  const auto turn = workspace->begin(times(kScatterOp, n, static_cast<int64_t>(ScatterCall::part_bytes(left, right, n))), kScatterOp);
  ScatterCall call(*workspace, left, right);
  at::Tensor sum;
  workspace->ended([&] { sum = call.enqueue(turn, mean); });
  return sum;
}

} // namespace symm
