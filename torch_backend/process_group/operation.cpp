#include "process_group/operation.hpp"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "errors.hpp"

namespace symm {

namespace {

Span piece_of(const at::Tensor& contiguous, int64_t start, int64_t count) {
  const auto bytes = static_cast<size_t>(contiguous.element_size());
  const auto address = reinterpret_cast<size_t>(contiguous.data_ptr());
  return Span{address + static_cast<size_t>(start) * bytes, static_cast<size_t>(count) * bytes};
}

// Adds consecutive parts of `whole`; `split_lengths` in arguments.hpp makes their `lengths`.
void add_pieces(
    const at::Tensor& whole, const std::vector<int64_t>& lengths,
    c10::SmallVectorImpl<Span>& spans) {
  int64_t start = 0;
  for (const auto length : lengths) {
    spans.push_back(piece_of(whole, start, length));
    start += length;
  }
}

// Returns true if two elements of the strided `tensor` share an address.
bool elements_overlap(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) {
      dimensions.emplace_back(tensor.stride(i), tensor.size(i));
    }
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t reach = 0;
  bool interleaved = false;
  for (const auto& [stride, size] : dimensions) {
    interleaved |= stride <= reach;
    reach += stride * (size - 1);
  }
  if (!interleaved) {
    return false;
  }
  if (dimensions[0].first == 0 || tensor.numel() > reach + 1) {
    return true;
  }
  // Rows that interleave, such as offsets 0, 3, 2, 5, 4, 7: only a look at each element tells.
  std::vector<bool> used(reach + 1);
  std::vector<int64_t> index(dimensions.size());
  int64_t offset = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    if (used[offset]) {
      return true;
    }
    used[offset] = true;
    for (size_t d = 0; d < index.size(); ++d) {
      const auto [stride, size] = dimensions[d];
      offset += stride;
      if (++index[d] < size) {
        break;
      }
      offset -= stride * size;
      index[d] = 0;
    }
  }
  return false;
}

// Returns true if the memory of `tensor` has its values in order.
bool is_direct(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Returns a contiguous tensor of the shape and type of `tensor`.
at::Tensor contiguous_like(const at::Tensor& tensor) {
  return at::empty(
      tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
}

// Returns the range from the first to the last byte of a strided tensor with elements.
Span reach_of(const at::Tensor& tensor) {
  int64_t reach = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    reach += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return Span{
      reinterpret_cast<size_t>(tensor.data_ptr()),
      static_cast<size_t>(reach) * tensor.element_size()};
}

} // namespace

Span span_of(const at::Tensor& contiguous) {
  return piece_of(contiguous, 0, contiguous.numel());
}

void check_writable(const at::Tensor& output, const char* op) {
  static const auto torch_frees = c10::GetCPUAllocator()->raw_deleter();
  const auto& storage = output.storage();
  if (!output.is_cpu() || output.numel() == 0 || storage.data_ptr().get_deleter() == torch_frees) {
    return;
  }
  // A weak owner keeps the address of a freed storage from being reused.
  thread_local std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> last;
  if (last && last->_unsafe_get_target() == storage.unsafeGetStorageImpl()) {
    return;
  }
  const auto span = reach_of(output);
  TORCH_CHECK_VALUE(
      is_writable(span.addr, span.bytes), op,
      ": the output tensor lies in memory that may not be written, such as a file that is mapped "
      "read-only; clone() it first");
  last = storage.getWeakStorageImpl();
}

std::string Operation::name() const {
  return std::strchr(title, ':') + 1;
}

void Operation::check(const at::Tensor& tensor, const char* role) {
  TORCH_CHECK_VALUE(tensor.defined(), name(), ": the ", role, " tensor is undefined");
  const auto place = tensor.device();
  TORCH_CHECK_VALUE(
      place.is_cpu() || place.is_cuda(), name(), ": the ", role, " tensor is on ", place,
      ", backend symm serves CPU and CUDA tensors");
  TORCH_CHECK_VALUE(
      !device || place == *device || (place.is_cpu() && device->is_cpu()), name(), ": the ", role,
      " tensor is on ", place, ", another one on ", *device,
      "; all tensors of a call must be on one device");
  device = place;
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided, name(), ": the ", role, " tensor has layout ",
      tensor.layout(), ", only strided (dense) tensors are served");
  TORCH_CHECK_VALUE(
      !tensor.is_nested() && tensor.has_storage(), name(), ": the ", role,
      " tensor is not a plain dense tensor");
  if (tensor.numel() == 0) {
    return;
  }
  const auto& storage = tensor.storage();
  TORCH_CHECK_VALUE(
      storage.data() != nullptr, name(), ": the ", role, " tensor has ", tensor.numel(),
      " elements but its storage was freed");
  const auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  TORCH_CHECK_VALUE(
      needed <= storage.nbytes(), name(), ": the ", role, " tensor ends at byte ", needed,
      " of a storage of ", storage.nbytes(), " bytes");
}

CallSpec& Operation::begin(Collective op, const at::Tensor& like, uint32_t site) {
  auto& call = calls.emplace_back().spec;
  call.op = op;
  call.dtype = like.defined() ? static_cast<int32_t>(like.scalar_type()) : 0;
  call.factor = 1.0;
  call.call_site = site;
  return call;
}

void Operation::reduce_with(const ::c10d::ReduceOp& op) {
  auto& call = calls.back().spec;
  call.reduce_op = static_cast<uint8_t>(op.op_);
  if (op.op_ != ::c10d::ReduceOp::PREMUL_SUM) {
    return;
  }
  const auto* supplement = dynamic_cast<const PremulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, name(), ": PREMUL_SUM comes without a factor");
  const auto& tensor = supplement->tensor_factor;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor.defined() || tensor.device().is_cpu(), name(),
      ": the factor of PREMUL_SUM must be a number or a CPU tensor");
  call.factor = tensor.defined() ? tensor.item<double>() : supplement->double_factor;
}

at::Tensor Operation::readable(const at::Tensor& tensor) {
  check(tensor, "input");
  return is_direct(tensor) ? alive_.emplace_back(tensor) : copy_of(tensor);
}

bool Operation::aliases_output(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return false;
  }
  const auto span = reach_of(tensor);
  const auto ends_before = [](const Span& one, const Span& other) {
    return one.addr + one.bytes <= other.addr;
  };
  const auto [first, last] = std::equal_range(written_.begin(), written_.end(), span, ends_before);
  if (first == last) {
    written_.insert(first, span);
    return false;
  }
  const auto end = std::max(span.addr + span.bytes, std::prev(last)->addr + std::prev(last)->bytes);
  first->addr = std::min(span.addr, first->addr);
  first->bytes = end - first->addr;
  written_.erase(std::next(first), last);
  return true;
}

at::Tensor Operation::writable(const at::Tensor& tensor, bool keep_values) {
  check(tensor, "output");
  check_writable(tensor, std::strchr(title, ':') + 1);
  const auto direct = is_direct(tensor);
  if (!aliases_output(tensor) && direct) {
    return alive_.emplace_back(tensor);
  }
  TORCH_CHECK_VALUE(
      direct || !elements_overlap(tensor), name(),
      ": elements of the output tensor share memory (sizes ", tensor.sizes(), ", strides ",
      tensor.strides(), "); clone() it first");
  auto copy = keep_values ? copy_of(tensor) : alive_.emplace_back(contiguous_like(tensor));
  pending_.emplace_back(tensor, copy);
  return copy;
}

void Operation::add_input(const at::Tensor& tensor) {
  note_input(tensor);
  calls.back().inputs.push_back(span_of(readable(tensor)));
}

void Operation::add_output(const at::Tensor& tensor) {
  outputs.push_back(tensor);
  calls.back().outputs.push_back(span_of(writable(tensor, false)));
}

void Operation::transform(const at::Tensor& tensor) {
  note_input(tensor);
  outputs.push_back(tensor);
  const auto span = span_of(writable(tensor, true));
  calls.back().inputs.push_back(span);
  calls.back().outputs.push_back(span);
}

void Operation::add_inputs(const at::Tensor& tensor, const std::vector<int64_t>& lengths) {
  note_input(tensor);
  add_pieces(readable(tensor), lengths, calls.back().inputs);
}

void Operation::add_outputs(const at::Tensor& tensor, const std::vector<int64_t>& lengths) {
  outputs.push_back(tensor);
  add_pieces(writable(tensor, false), lengths, calls.back().outputs);
}

void Operation::copy_in() {
  const at::AutoDispatchBelowADInplaceOrView plain;
  if (const auto step = std::exchange(steps.before, nullptr)) {
    step();
  }
  for (auto& [tensor, copy] : to_fill_) {
    copy.copy_(tensor);
  }
  to_fill_.clear();
}

void Operation::write_back() {
  // Writes as the core writes contiguous tensors: invisible to autograd, and also where inference
  // tensors may not be changed.
  const at::AutoDispatchBelowADInplaceOrView plain;
  for (auto& [tensor, copy] : pending_) {
    tensor.copy_(copy);
  }
  pending_.clear();
  if (const auto step = std::exchange(steps.after, nullptr)) {
    step();
  }
}

at::Tensor Operation::copy_of(const at::Tensor& tensor) {
  auto copy = contiguous_like(tensor);
  to_fill_.emplace_back(tensor, copy);
  // On a device, `copy_in` only enqueues the copy.
  alive_.push_back(tensor);
  return alive_.emplace_back(copy);
}

void Operation::add_specs(CallSpecs& specs) const {
  for (const auto& call : calls) {
    auto& spec = specs.emplace_back(call.spec);
    spec.inputs = {call.inputs.data(), call.inputs.size()};
    spec.outputs = {call.outputs.data(), call.outputs.size()};
  }
}

void Operation::release_inputs() {
  inputs.clear();
  alive_.clear();
}

std::vector<std::vector<at::Tensor>> Operation::results() const {
  if (!lists.empty()) {
    return lists;
  }
  // Gloo rejects such outputs, which cannot be divided among the ranks, so any form will do.
  const auto whole = [this](const at::Tensor& output) {
    return output.dim() == 0 || output.size(0) % parts != 0;
  };
  if (parts == 0 || std::any_of(outputs.begin(), outputs.end(), whole)) {
    return {outputs};
  }
  std::vector<std::vector<at::Tensor>> by_rank(nested() ? static_cast<size_t>(parts) : 1);
  for (const auto& output : outputs) {
    const auto pieces = output.chunk(parts, 0);
    for (size_t rank = 0; rank < pieces.size(); ++rank) {
      by_rank[nested() ? rank : 0].push_back(pieces[rank]);
    }
  }
  return by_rank;
}

void Operation::copy_input(Span& input) {
  const auto bytes = static_cast<int64_t>(input.bytes);
  const auto options = at::TensorOptions(at::kByte).device(*device);
  auto* const start = reinterpret_cast<void*>(input.addr);
  input = span_of(copy_of(
      at::for_blob(start, {bytes}).options(options).target_device(*device).make_tensor()));
}

} // namespace symm
