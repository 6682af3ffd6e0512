// The core's stores as torch stores.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "symm/src/bridge/native_store.rs.h"

namespace symm {

// A store of the core, usable from any thread. The timeout limits every call; 0 means the core's
// maximum. Failures are torch's exceptions: DistStoreError (and its DistQueueEmptyError),
// DistNetworkError, ValueError.
class SymmStore : public ::c10d::Store {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Value = std::vector<uint8_t>;

  SymmStore(rust::Box<NativeStore> store, Milliseconds timeout);

  // Shares the contents and copies the timeout.
  c10::intrusive_ptr<::c10d::Store> clone() override;

  using Store::set;
  void set(const std::string& key, const Value& value) override;
  using Store::compareSet;
  Value compareSet(const std::string& key, const Value& expected, const Value& desired) override;
  Value get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const Milliseconds& timeout) override;
  void setTimeout(const Milliseconds& timeout) override;
  void append(const std::string& key, const Value& value) override;
  std::vector<Value> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<Value>& values) override;
  bool hasExtendedApi() const override;
  void queuePush(const std::string& key, const Value& value) override;
  Value queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override;
  std::vector<std::string> listKeys() override;

  // Returns once all `size` ranks have called it with this key. c10d has its own `barrier`, which
  // takes no rank.
  void rankBarrier(
      const std::string& key, int64_t rank, int64_t size,
      std::optional<Milliseconds> timeout) const;

  // Returns once all ranks have arrived at this store, which rank 0 serves. Fails with
  // SymmConfigError if another live process has joined as this rank.
  void assemble(const std::string& prefix, int64_t rank, int64_t size, Milliseconds timeout) const;

  // Publishes `word` on the topic `what`, and returns the words of all ranks.
  std::vector<std::string> gather(
      const std::string& prefix,
      const std::string& what,
      const std::string& word,
      int64_t rank,
      int64_t size,
      Milliseconds timeout) const;

 protected:
  rust::Box<NativeStore> share() const;

 private:
  StoreReply call(
      StoreOp op,
      rust::Slice<const Blob> keys,
      rust::Slice<const Blob> values,
      int64_t amount,
      Milliseconds timeout) const;
  StoreReply call(
      StoreOp op, std::initializer_list<Blob> keys, std::initializer_list<Blob> values,
      int64_t amount = 0) const;

  rust::Box<NativeStore> store_;
};

// A store in this process's memory.
class MemoryStore final : public SymmStore {
 public:
  MemoryStore();
  MemoryStore(rust::Box<NativeStore> store, Milliseconds timeout);
  c10::intrusive_ptr<::c10d::Store> clone() override;
};

// A store in a file.
class FileStore final : public SymmStore {
 public:
  // `timeout` also limits the opening.
  FileStore(const std::string& path, int64_t world_size, Milliseconds timeout);
  FileStore(const FileStore& other, rust::Box<NativeStore> store);
  c10::intrusive_ptr<::c10d::Store> clone() override;

  // The path in the system's encoding.
  const std::string path;
  const int64_t world_size;
};

// A store on a server.
class TcpStore final : public SymmStore {
 public:
  explicit TcpStore(const TcpSpec& spec);
  TcpStore(const TcpStore& other, rust::Box<NativeStore> store);
  c10::intrusive_ptr<::c10d::Store> clone() override;

  // The host name or address of the server.
  const std::string host;
  const uint16_t port;
  const bool is_master;
  // Number of workers; negative if unknown.
  const int64_t world_size;
  const bool has_secret;

 private:
  TcpStore(const TcpSpec& spec, StoreResult opened);
};

} // namespace symm
