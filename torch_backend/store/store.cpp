#include "store/store.hpp"

#include <c10/util/Type.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <string>
#include <typeinfo>
#include <vector>

#include "errors.hpp"
#include "symm/src/bridge.rs.h"

namespace symm {

namespace {

using Value = std::vector<uint8_t>;

std::string text(const Blob& piece) {
  return {piece.data.begin(), piece.data.end()};
}

std::vector<std::string> texts(rust::Slice<const Blob> pieces) {
  std::vector<std::string> result;
  for (const auto& piece : pieces) {
    result.push_back(text(piece));
  }
  return result;
}

Value bytes(const Blob& piece) {
  return {piece.data.begin(), piece.data.end()};
}

std::vector<Value> all_bytes(rust::Slice<const Blob> pieces) {
  std::vector<Value> result;
  for (const auto& piece : pieces) {
    result.push_back(bytes(piece));
  }
  return result;
}

void add(StoreReply& answer, const Value& value) {
  answer.pieces->add({value.data(), value.size()});
}

void ask(
    ::c10d::Store& store,
    StoreOp op,
    rust::Slice<const Blob> keys,
    rust::Slice<const Blob> values,
    int64_t amount,
    int64_t timeout_ms,
    StoreReply& answer) {
  // Request::check() has verified that the keys and values exist.
  switch (op) {
    case StoreOp::Set:
      return store.set(text(keys[0]), bytes(values[0]));
    case StoreOp::CompareSet:
      return add(answer, store.compareSet(text(keys[0]), bytes(values[0]), bytes(values[1])));
    case StoreOp::Get:
      return add(answer, store.get(text(keys[0])));
    case StoreOp::Add:
      answer.number = store.add(text(keys[0]), amount);
      return;
    case StoreOp::Check:
      answer.number = store.check(texts(keys)) ? 1 : 0;
      return;
    case StoreOp::Wait:
      return store.wait(texts(keys), std::chrono::milliseconds(timeout_ms));
    case StoreOp::Delete:
      answer.number = store.deleteKey(text(keys[0])) ? 1 : 0;
      return;
    case StoreOp::NumKeys:
      answer.number = store.getNumKeys();
      return;
    case StoreOp::Append:
      return store.append(text(keys[0]), bytes(values[0]));
    case StoreOp::MultiGet:
      for (const auto& value : store.multiGet(texts(keys))) {
        add(answer, value);
      }
      return;
    case StoreOp::MultiSet:
      return store.multiSet(texts(keys), all_bytes(values));
    case StoreOp::Push:
      return store.queuePush(text(keys[0]), bytes(values[0]));
    case StoreOp::Pop:
      return add(answer, store.queuePop(text(keys[0]), true));
    case StoreOp::TryPop:
      return add(answer, store.queuePop(text(keys[0]), false));
    case StoreOp::QueueLen:
      answer.number = store.queueLen(text(keys[0]));
      return;
    case StoreOp::ListKeys:
      for (const auto& key : store.listKeys()) {
        answer.pieces->add({reinterpret_cast<const uint8_t*>(key.data()), key.size()});
      }
      return;
  }
}

} // namespace

StoreReply TorchStore::call(
    StoreOp op,
    rust::Slice<const Blob> keys,
    rust::Slice<const Blob> values,
    int64_t amount,
    int64_t timeout_ms) const noexcept {
  StoreReply answer{Status{}, 0, no_blobs()};
  try {
    ask(*store_, op, keys, values, amount, timeout_ms, answer);
  } catch (...) {
    answer.status = status_of_store(std::current_exception());
  }
  return answer;
}

bool TorchStore::extended() const {
  try {
    return store_->hasExtendedApi();
  } catch (...) {
    // A store written in Python, whose method raises. The core takes no exception here.
    return false;
  }
}

int64_t TorchStore::timeout_ms() const {
  return store_->getTimeout().count();
}

rust::String TorchStore::name() const {
  auto store = store_;
  if (const auto* part = dynamic_cast<::c10d::PrefixStore*>(store.get())) {
    store = const_cast<::c10d::PrefixStore*>(part)->getUnderlyingNonPrefixStore();
  }
  const auto& one = *store;
  auto name = "the store (" + c10::demangle(typeid(one).name()) + ")";
  if (const auto* tcp = dynamic_cast<const ::c10d::TCPStore*>(store.get())) {
    name += " at " + tcp->getHost() + ":" + std::to_string(tcp->getPort());
  }
  return rust::String::lossy(name);
}

} // namespace symm
