#include "operation.hpp"

#include <ATen/MemoryOverlap.h>

#include <cstring>

namespace symm {

namespace {

Span piece_of(const at::Tensor& contiguous, int64_t start, int64_t count) {
  const auto bytes = static_cast<size_t>(contiguous.element_size());
  const auto address = reinterpret_cast<size_t>(contiguous.data_ptr());
  return Span{address + static_cast<size_t>(start) * bytes, static_cast<size_t>(count) * bytes};
}

} // namespace

Span span_of(const at::Tensor& contiguous) {
  return piece_of(contiguous, 0, contiguous.numel());
}

std::string Operation::name() const {
  return std::strchr(title, ':') + 1;
}

void Operation::check(const at::Tensor& tensor, const char* role) const {
  TORCH_CHECK_VALUE(tensor.defined(), name(), ": the ", role, " tensor is undefined");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor.is_cuda(),
      name(), ": the ", role, " tensor is on ", tensor.device(),
      "; backend symm serves CPU tensors only so far, use \"cpu:symm,cuda:nccl\"");
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu(),
      name(), ": the ", role, " tensor is on ", tensor.device(), ", backend symm serves CPU tensors");
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided,
      name(), ": the ", role, " tensor has layout ", tensor.layout(), ", only strided (dense) tensors are served");
  TORCH_CHECK_VALUE(
      tensor.numel() == 0 || tensor.storage().data() != nullptr,
      name(), ": the ", role, " tensor has ", tensor.numel(), " elements but its storage was freed");
}

CallSpec& Operation::begin(Collective op, const at::Tensor& like) {
  auto& call = calls.emplace_back();
  call.op = static_cast<uint8_t>(op);
  call.dtype = like.defined() ? static_cast<int32_t>(like.scalar_type()) : 0;
  call.factor = 1.0;
  return call;
}

void Operation::reduce_with(const ::c10d::ReduceOp& op) {
  auto& call = calls.back();
  call.reduce_op = static_cast<uint8_t>(op.op_);
  if (op.op_ != ::c10d::ReduceOp::PREMUL_SUM) {
    return;
  }
  const auto* supplement = dynamic_cast<const PremulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, name(), ": PREMUL_SUM comes without a factor");
  const auto& tensor = supplement->tensor_factor;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor.defined() || tensor.device().is_cpu(), name(), ": the factor of PREMUL_SUM must be a number or a CPU tensor");
  call.factor = tensor.defined() ? tensor.item<double>() : supplement->double_factor;
}

at::Tensor Operation::readable(const at::Tensor& tensor) {
  check(tensor, "input");
  return alive_.emplace_back(tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg().contiguous()
                                                                 : tensor.contiguous());
}

at::Tensor Operation::writable(const at::Tensor& tensor, bool keep_values) {
  check(tensor, "output");
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    return alive_.emplace_back(tensor);
  }
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
      name(), ": elements of the output tensor share memory (sizes ", tensor.sizes(), ", strides ", tensor.strides(),
      "); clone() it first");
  auto copy = keep_values ? tensor.clone(at::MemoryFormat::Contiguous)
                          : at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  pending_.emplace_back(tensor, copy);
  return alive_.emplace_back(copy);
}

void Operation::give(const at::Tensor& tensor) {
  inputs.push_back(tensor);
  calls.back().inputs.push_back(span_of(readable(tensor)));
}

void Operation::take(const at::Tensor& tensor) {
  outputs.push_back(tensor);
  calls.back().outputs.push_back(span_of(writable(tensor, false)));
}

void Operation::transform(const at::Tensor& tensor) {
  inputs.push_back(tensor);
  outputs.push_back(tensor);
  const auto span = span_of(writable(tensor, true));
  calls.back().inputs.push_back(span);
  calls.back().outputs.push_back(span);
}

void Operation::give_pieces(const at::Tensor& tensor, const std::vector<int64_t>& lengths) {
  inputs.push_back(tensor);
  const auto whole = readable(tensor);
  int64_t start = 0;
  for (const auto length : lengths) {
    calls.back().inputs.push_back(piece_of(whole, start, length));
    start += length;
  }
}

void Operation::take_pieces(const at::Tensor& tensor, const std::vector<int64_t>& lengths) {
  outputs.push_back(tensor);
  const auto whole = writable(tensor, false);
  int64_t start = 0;
  for (const auto length : lengths) {
    calls.back().outputs.push_back(piece_of(whole, start, length));
    start += length;
  }
}

void Operation::write_back() {
  for (auto& [tensor, copy] : pending_) {
    at::NoGradGuard no_grad;
    tensor.copy_(copy);
  }
  pending_.clear();
}

} // namespace symm
