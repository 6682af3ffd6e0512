// Send and receive.
#include "process_group/process_group.hpp"

#include "process_group/arguments.hpp"

namespace symm {

using ::c10d::OpType;

ProcessGroupSymm::WorkPtr ProcessGroupSymm::transfer(
    std::shared_ptr<Operation> operation,
    const at::Tensor& tensor,
    int peer,
    int tag,
    bool send) try {
  TORCH_CHECK_VALUE(
      tag >= 0, "ProcessGroupSymm::", operation->name(), ": Tag must be nonnegative, got ", tag);
  MessageSpec transfer;
  transfer.peer = peer;
  transfer.tag = tag;
  transfer.dtype = static_cast<int32_t>(tensor.scalar_type());
  transfer.span = span_of(send ? operation->readable(tensor) : operation->writable(tensor, false));
  const auto timeout = extended(::c10d::kUnsetTimeout);
  transfer.timeout_ms = timeout.count();
  transfer.send = send;
  operation->note_input(tensor);
  operation->outputs.push_back(tensor);
  auto from = caller((*group_)->sequence());
  from.rank = peer;
  from.transfer = true;
  if (!operation->on_cpu()) {
    return launch_on_device(std::move(operation), transfer, from);
  }
  // A message has no turn: it does not wait for other calls of the group.
  operation->copy_in();
  return recorded(*operation, from, [&] {
    auto work = c10::make_intrusive<WorkSymm>(getRank(), group_, operation, stated(timeout));
    auto done = std::make_unique<WorkCompletion>(work);
    const auto ticket = send ? (*group_)->send(transfer, std::move(done))
                             : (*group_)->recv(transfer, std::move(done));
    work->begun(from.sequence, ticket);
    if (ticket == 0) {
      work->rethrow();
    }
    return remember(work);
  });
} catch (...) {
  refused(peer, tag, send);
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::send(Tensors& tensors, int destination, int tag) {
  const auto& tensor = single("send", tensors);
  TORCH_CHECK_VALUE(
      destination >= 0 && destination < getSize(), "ProcessGroupSymm::send: destination rank ",
      destination, " is outside the group of ", getSize(), " ranks");
  return transfer(
      std::make_shared<Operation>(OpType::SEND, "symm:send"), tensor, destination, tag, true);
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::recv(Tensors& tensors, int source, int tag) {
  const auto& tensor = single("recv", tensors);
  TORCH_CHECK_VALUE(
      source >= 0 && source < getSize(), "ProcessGroupSymm::recv: source rank ", source,
      " is outside the group of ", getSize(), " ranks");
  return transfer(
      std::make_shared<Operation>(OpType::RECV, "symm:recv"), tensor, source, tag, false);
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::recvAnysource(Tensors& tensors, int tag) {
  const auto& tensor = single("recvAnysource", tensors);
  return transfer(
      std::make_shared<Operation>(OpType::RECVANYSOURCE, "symm:recvAnySource"), tensor, -1, tag,
      false);
}

} // namespace symm
