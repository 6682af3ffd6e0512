// Joining, leaving and running; the calls themselves are in collectives.cpp, tensor_lists.cpp and
// point_to_point.cpp.
#include "process_group/process_group.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <list>

#include "errors.hpp"
#include "fused/workspace.hpp"
#include "gil.hpp"
#include "internode/transport.hpp"
#include "store/store.hpp"

namespace symm {

namespace {

// Every group of this process.
struct Living {
  std::mutex mutex;
  std::list<std::weak_ptr<rust::Box<GroupHandle>>> groups;
};

Living& living() {
  // Never destroyed, because threads may still end groups while the process exits.
  static auto* all = new Living;
  return *all;
}

// Throws if the options ask for a group whose members can change.
void check_members_stay(const ::c10d::Backend::Options& options) {
  if (reconfigurable(options)) {
    check(
        Status{
            ErrorKind::Config, c10::str(
                                   "group \"", options.group_name,
                                   "\" is asked for with enable_reconfigure=True, and the members "
                                   "of a group of symm never change: ",
                                   "leave it out; after a failure call destroy_process_group() and "
                                   "make a new group of the ranks that are left")});
  }
}

c10::intrusive_ptr<ProcessGroupSymm::Options> child_options(const ::c10d::Backend::Options& given) {
  check_members_stay(given);
  auto options = c10::make_intrusive<ProcessGroupSymm::Options>(given.timeout);
  options->group_name = given.group_name;
  options->group_desc = given.group_desc;
  if (const auto* own = dynamic_cast<const ProcessGroupSymm::Options*>(&given)) {
    options->inter_node_backend = own->inter_node_backend;
    options->reduce_dtype = own->reduce_dtype;
    options->order = own->order;
    options->cta_policy = own->cta_policy;
    options->max_ctas = own->max_ctas;
  }
  options->global_ranks_in_group = given.global_ranks_in_group;
  return options;
}

// Returns the options' part of the arguments of `join`.
JoinSpec join_spec(const ProcessGroupSymm::Options& options) {
  JoinSpec spec;
  spec.group = options.group_name;
  for (const auto global : options.global_ranks_in_group) {
    spec.global_ranks.push_back(static_cast<int32_t>(global));
  }
  spec.timeout_ms = options.timeout.count();
  spec.inter_node_backend = options.inter_node_backend;
  spec.reduce_dtype = options.reduce_dtype;
  spec.order = options.order;
  spec.cta_policy = options.cta_policy;
  spec.max_ctas = options.max_ctas;
  return spec;
}

} // namespace

void check_choices(const ProcessGroupSymm::Options& options) {
  check(check_choices(join_spec(options)));
}

Group join_group(
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    const ProcessGroupSymm::Options& options,
    bool is_default) {
  auto spec = join_spec(options);
  spec.rank = rank;
  spec.size = size;
  spec.is_default = is_default;
  auto joined = join(
      std::make_unique<TorchStore>(store), std::make_shared<Transports>(options.group_name, store),
      spec);
  check(joined.status);
  auto group = std::make_shared<rust::Box<GroupHandle>>(std::move(joined.group));
  auto& all = living();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.groups.remove_if([](const auto& other) { return other.expired(); });
  all.groups.push_back(group);
  return group;
}

ProcessGroupSymm::ProcessGroupSymm(
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options)
    : Backend(rank, size), store_(store), options_(std::move(options)) {
  check_members_stay(*options_);
  // torch lists the ranks of every group except the default one.
  group_ = join_group(store_, rank, size, *options_, options_->global_ranks_in_group.empty());
}

ProcessGroupSymm::~ProcessGroupSymm() {
  ProcessGroupSymm::release_resources();
}

void ProcessGroupSymm::release_resources() {
  if (!group_) {
    return;
  }
  // Python may drop the last reference with the GIL held, and leaving waits for threads whose
  // completions may need the GIL.
  without_gil([this] { (*group_)->shutdown(); });
  drop_coalesced();
  pools_.let_go();
  streams_.clear();
  children_.clear();
  group_.reset();
  store_.reset();
}

void leave_all(std::chrono::milliseconds limit, const std::string& farewell) {
  std::vector<Group> groups;
  {
    auto& all = living();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& weak : all.groups) {
      if (auto group = weak.lock()) {
        groups.push_back(std::move(group));
      }
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (const auto& group : groups) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    (*group)->leave(std::max<int64_t>(left.count(), 1), rust::Str(farewell));
  }
}

c10::intrusive_ptr<::c10d::Backend::Options> ProcessGroupSymm::getBackendOptions() {
  // Before torch 2.14, split_group and merge_remote_group write the name, timeout and description
  // of the new group to these.
  return options_->clone();
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::launch(
    std::shared_ptr<Operation> operation,
    std::chrono::milliseconds timeout,
    bool async) {
  timeout = extended(timeout);
  if (!operation->on_cpu()) {
    check(operation->begin_with([&](auto calls) { return (*group_)->examine(calls); }).status);
    return launch_on_device(operation, timeout, async);
  }
  const auto seen = operation->seen;
  return recorded(*operation, caller(seen ? (*group_)->sequence() + 1 : 0), [&]() -> WorkPtr {
    auto work = c10::make_intrusive<WorkSymm>(getRank(), group_, operation, stated(timeout));
    bool queued = async;
    const auto outcome = operation->begin_with([&](auto calls) {
      // Only a queued call makes copies in its turn.
      queued = async || operation->copies();
      return queued ? (*group_)->submit(
                          calls, timeout.count(), seen, std::make_unique<WorkCompletion>(work))
                    : (*group_)->run(calls, timeout.count(), seen);
    });
    work->begun(outcome.sequence, outcome.ticket);
    if (!queued || outcome.status.kind != ErrorKind::None) {
      work->complete(exception_of(outcome.status), -1);
      work->rethrow();
    } else if (!async) {
      work->wait();
    }
    return remember(std::move(work));
  });
}

void ProcessGroupSymm::refused() const {
  const auto error = std::current_exception();
  // What a signal handler raises says nothing about the call, which may have ended.
  if (!is_python_error(error)) {
    (*group_)->reject(status_of(error).message);
  }
  throw;
}

void ProcessGroupSymm::refused(int peer, int tag, bool send) const {
  const auto error = std::current_exception();
  if (!is_python_error(error)) {
    MessageSpec transfer{};
    transfer.peer = peer;
    transfer.tag = tag;
    transfer.send = send;
    (*group_)->reject_message(transfer, status_of(error).message);
  }
  throw;
}

Caller ProcessGroupSymm::caller(uint64_t sequence) const {
  return {
      options_->group_name,
      getGroupDesc(),
      options_->global_ranks_in_group,
      getSize(),
      getRank(),
      sequence,
      false};
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::remember(WorkPtr work) {
  begin_extensions(work);
  std::lock_guard<std::mutex> lock(mutex_);
  if (coalesced_) {
    coalesced_->parts.push_back(work);
  }
  return work;
}

void ProcessGroupSymm::startCoalescing() {
  std::lock_guard<std::mutex> lock(mutex_);
  // If a block is open already, its earlier calls stay part of it.
  if (!coalesced_) {
    coalesced_.emplace();
  }
}

void ProcessGroupSymm::drop_coalesced() {
  // Destroyed without the lock, because the last reference to a tensor may run Python code.
  std::optional<Coalesced> block;
  const std::lock_guard<std::mutex> lock(mutex_);
  block.swap(coalesced_);
}

ProcessGroupSymm::WorkPtr ProcessGroupSymm::endCoalescing() {
  Coalesced block;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (coalesced_) {
      block = std::move(*coalesced_);
    }
    coalesced_.reset();
  }
  if (block.gathering) {
    try {
      block.gathering->launch();
    } catch (...) {
      if (!block.gathering->has_transfers()) {
        refused();
      }
      throw;
    }
    if (block.parts.size() == 1) {
      return block.gathering;
    }
  }
  return c10::make_intrusive<WorkCoalesced>(getRank(), std::move(block.parts));
}

uint64_t ProcessGroupSymm::getSequenceNumberForGroup() {
  return (*group_)->sequence();
}

void ProcessGroupSymm::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  (*group_)->set_timeout(timeout.count());
}

void ProcessGroupSymm::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  TORCH_CHECK_VALUE(
      timeout.count() >= 0, "addEphemeralTimeout: a timeout is extended by 0 ms or more, not by ",
      timeout.count());
  extensions_.add(timeout);
}

std::chrono::milliseconds ProcessGroupSymm::extended(std::chrono::milliseconds timeout) {
  if (!extensions_.any()) {
    return timeout;
  }
  bool open = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    open = coalesced_.has_value();
  }
  // In an open block, querying a work would launch the calls gathered so far.
  if (!open) {
    extensions_.expire();
  }
  const auto more = extensions_.sum();
  return more.count() > 0 ? stated(timeout) + more : timeout;
}

void ProcessGroupSymm::enableCollectivesTiming() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "ProcessGroupSymm::enableCollectivesTiming: backend symm does not time single calls; a "
      "profiler does, and so does "
      "python -m torch_symm trace");
}

::c10d::ErrorType ProcessGroupSymm::getError() {
  switch ((*group_)->error().kind) {
    case ErrorKind::None:
      return ::c10d::ErrorType::SUCCESS;
    case ErrorKind::Timeout:
      return ::c10d::ErrorType::TIMEOUT;
    case ErrorKind::Peer:
      return ::c10d::ErrorType::REMOTE_ERROR;
    case ErrorKind::Mismatch:
    case ErrorKind::Config:
    case ErrorKind::Aborted:
    case ErrorKind::Value:
    case ErrorKind::Type:
    case ErrorKind::NotImplemented:
    case ErrorKind::WaitTimeout:
    case ErrorKind::Internal:
    case ErrorKind::Network:
    case ErrorKind::QueueEmpty:
      break;
  }
  return ::c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupSymm::abort() {
  *closed_ = true;
  drop_coalesced();
  (*group_)->abort();
}

void ProcessGroupSymm::shutdown() {
  *closed_ = true;
  drop_coalesced();
  (*group_)->shutdown();
  // Drop the workspaces only after the group's kernels have ended, because freeing memory waits for
  // the device.
  Workspace::drop(options_->group_name);
  pools_.let_go();
}

c10::intrusive_ptr<ProcessGroupSymm> ProcessGroupSymm::joined(
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options) const {
  return c10::make_intrusive<ProcessGroupSymm>(store, rank, size, std::move(options));
}

c10::intrusive_ptr<::c10d::Backend> ProcessGroupSymm::split(
    const c10::intrusive_ptr<::c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<::c10d::Backend::Options>& opts) {
  const auto me = std::find(ranks.begin(), ranks.end(), getRank());
  if (me == ranks.end()) {
    return nullptr;
  }
  TORCH_CHECK_VALUE(opts, "split: the options of the new group are missing");
  // torch asks once per device type, and each time for the same group.
  if (auto same = living_child(opts->group_name)) {
    return same;
  }
  auto options = child_options(*opts);
  options->global_ranks_in_group.clear();
  for (const auto rank : ranks) {
    const auto& global = options_->global_ranks_in_group;
    options->global_ranks_in_group.push_back(
        global.empty() ? static_cast<uint64_t>(rank) : global.at(static_cast<size_t>(rank)));
  }
  auto prefixed = c10::make_intrusive<::c10d::PrefixStore>("symm-split/" + opts->group_name, store);
  const auto place = static_cast<int>(me - ranks.begin());
  auto child = joined(prefixed, place, static_cast<int>(ranks.size()), options);
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = children_.begin(); it != children_.end();) {
    it = it->second.expired() ? children_.erase(it) : std::next(it);
  }
  children_.insert_or_assign(opts->group_name, c10::weak_intrusive_ptr<ProcessGroupSymm>(child));
  return child;
}

c10::intrusive_ptr<::c10d::Backend> ProcessGroupSymm::living_child(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = children_.find(name);
  if (known == children_.end()) {
    return nullptr;
  }
  auto child = known->second.lock();
  if (!child || *child->closed_) {
    children_.erase(known);
    return nullptr;
  }
  return child;
}

c10::intrusive_ptr<::c10d::Backend> ProcessGroupSymm::merge(
    const c10::intrusive_ptr<::c10d::Store>& store,
    const c10::intrusive_ptr<::c10d::Backend::Options>& opts,
    const int& rank,
    const int& size) {
  TORCH_CHECK_VALUE(opts, "merge: the options of the new group are missing");
  auto options = child_options(*opts);
  // The options have the ranks of one of the merged groups, unless the caller gives new ranks.
  if (options->global_ranks_in_group.size() != static_cast<size_t>(size)) {
    options->global_ranks_in_group.clear();
  }
  auto prefixed = c10::make_intrusive<::c10d::PrefixStore>("symm-merge/" + opts->group_name, store);
  return joined(prefixed, rank, size, options);
}

} // namespace symm
