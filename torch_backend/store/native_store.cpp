#include "store/native_store.hpp"

#include <utility>

#include "errors.hpp"

namespace symm {

namespace {

using Value = SymmStore::Value;

Blob piece(const std::string& text) {
  return {{reinterpret_cast<const uint8_t*>(text.data()), text.size()}};
}

Blob piece(const Value& value) {
  return {{value.data(), value.size()}};
}

template <typename T>
std::vector<Blob> pieces(const std::vector<T>& list) {
  std::vector<Blob> result;
  result.reserve(list.size());
  for (const auto& item : list) {
    result.push_back(piece(item));
  }
  return result;
}

rust::Slice<const Blob> slice(const std::vector<Blob>& list) {
  return {list.data(), list.size()};
}

template <typename T>
std::vector<T> collected(const StoreReply& answer) {
  std::vector<T> result;
  const auto count = answer.pieces->count();
  result.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto data = answer.pieces->get(i);
    result.emplace_back(data.begin(), data.end());
  }
  return result;
}

Value value_of(const StoreReply& answer) {
  const auto data = answer.pieces->get(0);
  return {data.begin(), data.end()};
}

StoreResult checked(StoreResult opened) {
  check_store(opened.status);
  return opened;
}

} // namespace

SymmStore::SymmStore(rust::Box<NativeStore> store, Milliseconds timeout)
    : Store(timeout), store_(std::move(store)) {}

StoreReply SymmStore::call(
    StoreOp op,
    rust::Slice<const Blob> keys,
    rust::Slice<const Blob> values,
    int64_t amount,
    Milliseconds timeout) const {
  auto answer = store_->call(op, keys, values, amount, timeout.count());
  check_store(answer.status);
  return answer;
}

StoreReply SymmStore::call(
    StoreOp op,
    std::initializer_list<Blob> keys,
    std::initializer_list<Blob> values,
    int64_t amount) const {
  return call(op, {keys.begin(), keys.size()}, {values.begin(), values.size()}, amount, timeout_);
}

rust::Box<NativeStore> SymmStore::share() const {
  return store_->share();
}

c10::intrusive_ptr<::c10d::Store> SymmStore::clone() {
  return c10::make_intrusive<SymmStore>(share(), timeout_);
}

void SymmStore::set(const std::string& key, const Value& value) {
  call(StoreOp::Set, {piece(key)}, {piece(value)});
}

Value SymmStore::compareSet(const std::string& key, const Value& expected, const Value& desired) {
  return value_of(call(StoreOp::CompareSet, {piece(key)}, {piece(expected), piece(desired)}));
}

Value SymmStore::get(const std::string& key) {
  return value_of(call(StoreOp::Get, {piece(key)}, {}));
}

int64_t SymmStore::add(const std::string& key, int64_t amount) {
  return call(StoreOp::Add, {piece(key)}, {}, amount).number;
}

bool SymmStore::deleteKey(const std::string& key) {
  return call(StoreOp::Delete, {piece(key)}, {}).number != 0;
}

bool SymmStore::check(const std::vector<std::string>& keys) {
  return call(StoreOp::Check, slice(pieces(keys)), {}, 0, timeout_).number != 0;
}

int64_t SymmStore::getNumKeys() {
  return call(StoreOp::NumKeys, {}, {}).number;
}

void SymmStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void SymmStore::wait(const std::vector<std::string>& keys, const Milliseconds& timeout) {
  call(StoreOp::Wait, slice(pieces(keys)), {}, 0, timeout);
}

void SymmStore::setTimeout(const Milliseconds& timeout) {
  TORCH_CHECK_VALUE(timeout.count() >= 0, "a timeout of ", timeout.count(), " ms is negative");
  timeout_ = timeout;
}

void SymmStore::append(const std::string& key, const Value& value) {
  call(StoreOp::Append, {piece(key)}, {piece(value)});
}

std::vector<Value> SymmStore::multiGet(const std::vector<std::string>& keys) {
  return collected<Value>(call(StoreOp::MultiGet, slice(pieces(keys)), {}, 0, timeout_));
}

void SymmStore::multiSet(const std::vector<std::string>& keys, const std::vector<Value>& values) {
  call(StoreOp::MultiSet, slice(pieces(keys)), slice(pieces(values)), 0, timeout_);
}

bool SymmStore::hasExtendedApi() const {
  return true;
}

void SymmStore::queuePush(const std::string& key, const Value& value) {
  call(StoreOp::Push, {piece(key)}, {piece(value)});
}

Value SymmStore::queuePop(const std::string& key, bool block) {
  return value_of(call(block ? StoreOp::Pop : StoreOp::TryPop, {piece(key)}, {}));
}

int64_t SymmStore::queueLen(const std::string& key) {
  return call(StoreOp::QueueLen, {piece(key)}, {}).number;
}

std::vector<std::string> SymmStore::listKeys() {
  return collected<std::string>(call(StoreOp::ListKeys, {}, {}));
}

void SymmStore::rankBarrier(
    const std::string& key, int64_t rank, int64_t size, std::optional<Milliseconds> timeout) const {
  check_store(store_->barrier(piece(key).data, rank, size, timeout.value_or(timeout_).count()));
}

void SymmStore::assemble(
    const std::string& prefix, int64_t rank, int64_t size, Milliseconds timeout) const {
  const auto status = store_->meet(piece(prefix).data, {}, {}, rank, size, timeout.count()).status;
  status.kind == ErrorKind::Config ? symm::check(status) : check_store(status);
}

std::vector<std::string> SymmStore::gather(
    const std::string& prefix,
    const std::string& what,
    const std::string& word,
    int64_t rank,
    int64_t size,
    Milliseconds timeout) const {
  const auto answer = store_->meet(
      piece(prefix).data, piece(what).data, piece(word).data, rank, size, timeout.count());
  check_store(answer.status);
  return collected<std::string>(answer);
}

MemoryStore::MemoryStore() : SymmStore(store_memory(), kDefaultTimeout) {}

MemoryStore::MemoryStore(rust::Box<NativeStore> store, Milliseconds timeout)
    : SymmStore(std::move(store), timeout) {}

c10::intrusive_ptr<::c10d::Store> MemoryStore::clone() {
  return c10::make_intrusive<MemoryStore>(share(), timeout_);
}

FileStore::FileStore(const std::string& path, int64_t world_size, Milliseconds timeout)
    : SymmStore(checked(store_file(piece(path).data, world_size, timeout.count())).store, timeout),
      path(path),
      world_size(world_size) {}

FileStore::FileStore(const FileStore& other, rust::Box<NativeStore> store)
    : SymmStore(std::move(store), other.timeout_), path(other.path), world_size(other.world_size) {}

c10::intrusive_ptr<::c10d::Store> FileStore::clone() {
  return c10::make_intrusive<FileStore>(*this, share());
}

TcpStore::TcpStore(const TcpSpec& spec) : TcpStore(spec, checked(store_tcp(spec))) {}

TcpStore::TcpStore(const TcpSpec& spec, StoreResult opened)
    : SymmStore(std::move(opened.store), Milliseconds(spec.timeout_ms)),
      host(opened.host),
      port(opened.port),
      is_master(spec.is_master),
      world_size(spec.world_size),
      has_secret(!spec.secret.empty()) {}

TcpStore::TcpStore(const TcpStore& other, rust::Box<NativeStore> store)
    : SymmStore(std::move(store), other.timeout_),
      host(other.host),
      port(other.port),
      is_master(other.is_master),
      world_size(other.world_size),
      has_secret(other.has_secret) {}

c10::intrusive_ptr<::c10d::Store> TcpStore::clone() {
  return c10::make_intrusive<TcpStore>(*this, share());
}

} // namespace symm
