#include "hosts/engines.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace symm {

namespace {

Engines& known() {
  // Never destroyed: it holds functions of Python's.
  static auto* engines = new Engines;
  return *engines;
}

Status failed(const std::string& why) {
  return {Kind::Peer, rust::String::lossy(why)};
}

} // namespace

void make_engines_with(Engines engines) {
  known() = std::move(engines);
}

const Engines& engines() {
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

Engine Maker::make(rust::Str engine, rust::Str name, size_t rank, size_t size, int64_t timeout_ms, int device) const {
  const auto prefixed = c10::make_intrusive<::c10d::PrefixStore>(std::string(name), store_);
  return engines().make(
      std::string(engine),
      group_ + "/" + std::string(name),
      prefixed,
      static_cast<int>(rank),
      static_cast<int>(size),
      std::chrono::milliseconds(timeout_ms),
      device);
}

} // namespace symm
