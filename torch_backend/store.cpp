#include "store.hpp"

#include <chrono>
#include <string>
#include <vector>

#include "symm/src/bridge.rs.h"

namespace symm {

namespace {

std::vector<std::string> strings(rust::Slice<const rust::String> keys) {
  return {keys.begin(), keys.end()};
}

std::vector<uint8_t> bytes(rust::Slice<const uint8_t> slice) {
  return {slice.begin(), slice.end()};
}

rust::Vec<uint8_t> to_rust(const std::vector<uint8_t>& data) {
  rust::Vec<uint8_t> result;
  result.reserve(data.size());
  std::copy(data.begin(), data.end(), std::back_inserter(result));
  return result;
}

} // namespace

rust::Vec<uint8_t> TorchStore::compare_set(
    rust::Str key,
    rust::Slice<const uint8_t> expected,
    rust::Slice<const uint8_t> desired) const {
  return to_rust(store_->compareSet(std::string(key), bytes(expected), bytes(desired)));
}

bool TorchStore::wait(rust::Slice<const rust::String> keys, int64_t timeout_ms) const {
  const auto names = strings(keys);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  try {
    store_->wait(names, std::chrono::milliseconds(timeout_ms));
    return true;
  } catch (const std::exception&) {
    // Every store has an exception of its own for a timeout; the clock tells it from a failure.
    if (std::chrono::steady_clock::now() + std::chrono::milliseconds(50) >= deadline) {
      return false;
    }
    throw;
  }
}

rust::Vec<Bytes> TorchStore::multi_get(rust::Slice<const rust::String> keys) const {
  std::vector<std::vector<uint8_t>> values;
  if (store_->hasExtendedApi()) {
    values = store_->multiGet(strings(keys));
  } else {
    for (const auto& key : keys) {
      values.push_back(store_->get(std::string(key)));
    }
  }
  rust::Vec<Bytes> result;
  for (const auto& value : values) {
    result.push_back(Bytes{to_rust(value)});
  }
  return result;
}

bool TorchStore::check(rust::Slice<const rust::String> keys) const {
  return store_->check(strings(keys));
}

void TorchStore::remove(rust::Str key) const {
  try {
    store_->deleteKey(std::string(key));
  } catch (const c10::NotImplementedError&) {
    // A store without deletion keeps its keys until it goes itself.
  }
}

} // namespace symm
