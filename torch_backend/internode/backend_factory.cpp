#include "internode/backend_factory.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <thread>
#include <vector>

namespace symm {

namespace {

BackendFactories& known() {
  // Never destroyed, because it holds Python functions.
  static auto* factories = new BackendFactories;
  return *factories;
}

Status failed(const std::string& why) {
  return {ErrorKind::Peer, rust::String::lossy(why)};
}

// The part of a store through which backends connect. It polls for keys: a wait of torch's TCPStore
// would hold the only connection of the process, so three ranks that create links at once could
// each wait for a key that the next cannot set.
class MeetingStore final : public ::c10d::PrefixStore {
 public:
  MeetingStore(
      const std::string& prefix, c10::intrusive_ptr<::c10d::Store> store,
      std::function<bool()> given_up, bool patient)
      : PrefixStore(prefix, std::move(store)), given_up_(std::move(given_up)), patient_(patient) {}

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }

  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }

  void wait(const std::vector<std::string>& keys) override {
    wait(keys, getTimeout());
  }

  void wait(
      const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    using std::chrono::microseconds;
    const auto due = std::chrono::steady_clock::now() + timeout;
    for (microseconds pause{200}; !check(keys); pause = std::min(2 * pause, microseconds{10'000})) {
      if (given_up_()) {
        C10_THROW_ERROR(
            DistStoreError,
            c10::str("the group ended before a peer had said ", joinKey(keys.front())));
      }
      if (!patient_ && std::chrono::steady_clock::now() > due) {
        C10_THROW_ERROR(
            DistStoreError,
            c10::str(
                "nobody has said ", joinKey(keys.front()), " within ", timeout.count(), " ms"));
      }
      std::this_thread::sleep_for(pause);
    }
  }

 private:
  const std::function<bool()> given_up_;
  const bool patient_;
};

} // namespace

void set_backend_factories(BackendFactories factories) {
  known() = std::move(factories);
}

const BackendFactories& backend_factories() {
  return known();
}

Status backend_failure() noexcept {
  try {
    throw;
  } catch (const c10::Error& error) {
    return failed(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return failed(error.what());
  } catch (...) {
    return failed("an unknown exception");
  }
}

c10::intrusive_ptr<::c10d::Store> meeting_store(
    const std::string& name,
    c10::intrusive_ptr<::c10d::Store> store,
    std::function<bool()> given_up,
    bool patient) {
  return c10::make_intrusive<MeetingStore>(name, std::move(store), std::move(given_up), patient);
}

} // namespace symm
