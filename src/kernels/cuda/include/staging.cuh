// Staging of long messages: chunks move through slots at the receiver, with a flag for each chunk
// and a credit for each chunk that was read.
//
// A lane is one block per role on every rank; lane l carries chunks l, l + lanes, l + 2 lanes .. of
// every message. One chunk takes 4 steps:
//   1. The sender waits until the receiver has read the slot's previous chunk.
//   2. The sender writes the slot, fences and raises `arrived`.
//   3. The receiver waits for `arrived` (acquire, which pairs with that fence) and reads the slot.
//   4. The receiver raises `credit`.
//
// Both words count chunks since the group was created, and so do `sent` and `taken`, the two ends'
// copies in device memory: a replayed graph continues where the last call ended. Each word has one
// writer.
//
// A block with a thread that timed out ends without step 2 or 4 of the chunk. Whether one did is
// decided by a vote, in a barrier that these steps need anyway.
#pragma once
#include "copy_words.cuh"
#include "units.cuh"

// Number of slots of one lane, stage and source.
#define SLOTS 4u
// Number of ranks that send to one rank.
#define SOURCES (WORLD > 1 ? WORLD - 1u : 1u)

// Unit of the lengths of slots and chunks; `ALIGN` in src/coll/cuda/workspace/layout.rs is the
// same. 32 bits can number 1 TiB of such units, more than a GPU has, and 32-bit divisions are
// faster than 64-bit ones.
#define START_STEP 256u

// Words of one lane and stage.
struct Lane {
  // Written by this rank.
  u32 sent[MAX_WORLD];
  u32 taken[MAX_WORLD];
  // Written by the peers.
  u32 arrived[MAX_WORLD];
  u32 credit[MAX_WORLD];
};

// Location of a stage in a channel, and how messages are divided.
struct Staging {
  // Offsets in the channel of the lanes' words, and of the slots: [lane][source][slot], where
  // source 0 is the next rank, 1 the rank after it, and so on.
  u64 words;
  u64 slots;
  u32 slot_bytes;
  // Size of a chunk in this call, at most a slot; in exchanges each message has its own chunk size
  // (`ChunkOfMessage`).
  u32 chunk_bytes;
  u32 lanes;
  // Offset in the channel of the `CopyWords` in which the kernel announces its rank; 0 if a kernel
  // before it has done so.
  u32 arrivals;
};

// Lane and role of a block of a staged kernel. Blocks of a lane are adjacent, because a device may
// be unable to hold all blocks of all kernels at once, including other groups' kernels. It then
// starts each kernel with whole lanes, the same on every rank; these finish and make space for
// others. If all senders came first, two kernels that start in a different order on each rank could
// wait for each other forever.
struct Role {
  u32 lane, role;
};

// Returns the lane and role of block `block`. Roles rotate from lane to lane, so that a processor
// that gets every k-th block gets some blocks of each role.
DEVICE Role role_of(u32 block, u32 roles) {
  const u32 lane = block / roles;
  return {lane, (block + lane) % roles};
}

// One stage of this block's lane: where its words and slots are, and which chunks it carries.
struct Stage {
  const Common& common;
  const Staging& staging;
  u32 lane;

  DEVICE Stage(const Common& common, const Staging& staging, u32 lane)
      : common(common), staging(staging), lane(lane) {}

  DEVICE Lane* words(u32 rank) const { return (Lane*)(common.peer[rank] + staging.words) + lane; }

  // Returns the slot on rank `at` of the chunk `number` that another rank `from` sends to it.
  DEVICE Unit* slot_of(u32 at, u32 from, u32 number) const {
    const u32 source = (from + WORLD - at - 1) % WORLD;
    const u64 index = (u64)(lane * SOURCES + source) * SLOTS + number % SLOTS;
    return (Unit*)(common.peer[at] + staging.slots + index * staging.slot_bytes);
  }

  // Returns the number of this lane's chunks in a message of `bytes` in chunks of `chunk`.
  DEVICE u32 chunks(u64 bytes, u32 chunk) const {
    const u32 all = quotient_up((u32)((bytes + START_STEP - 1) / START_STEP), chunk / START_STEP);
    return all <= lane ? 0 : quotient_up(all - lane, staging.lanes);
  }

  // Index in its message of the lane's chunk `step`, and the offset at which it starts.
  DEVICE u32 index(u32 step) const { return step * staging.lanes + lane; }
  DEVICE u64 start(u32 step, u32 chunk) const { return (u64)index(step) * chunk; }

  // Returns the number of bytes in the lane's chunk `step` of a message of `bytes`.
  DEVICE u64 length(u64 bytes, u32 step, u32 chunk) const {
    const u64 first = start(step, chunk);
    return first >= bytes ? 0 : smaller(bytes - first, chunk);
  }

  // Returns the entry of the rank with this thread's number. Loops over the ranks, because an array
  // in registers cannot be indexed by a variable.
  DEVICE static u32 of_thread(const u32 (&number)[WORLD]) {
    u32 mine = 0;
    for_each_rank([&](u32 r) { mine = thread() == r ? number[r] : mine; });
    return mine;
  }

  // Loads the counts that the last call saved.
  DEVICE static void load_counts(const u32* counts, u32 (&number)[WORLD]) {
    for_each_rank([&](u32 r) { number[r] = counts[r]; });
  }

  // Saves the counts for the next call, once all threads of the block have loaded the old ones.
  DEVICE static void save_counts(u32* counts, const u32 (&number)[WORLD]) {
    sync_block();
    if (thread() == 0) {
      for_each_rank([&](u32 r) { counts[r] = number[r]; });
    }
  }

  // Adds one chunk to the counts of the ranks in `peers`.
  DEVICE static void advance(u32 (&number)[WORLD], u32 peers) {
    for_each_rank([&](u32 r) { number[r] += peers >> r & 1; });
  }
};

// Session of this block as the sender of a lane's stage: `begin`, for every chunk `await_credit`,
// write `slot` and `send`, then `end`. It counts the chunks, so that a slot is written only after
// its receiver has read it, also across calls. For example, to send one chunk to rank r:
//   SendSession session(args.common, args.staging, lane);
//   session.begin();
//   session.await_credit(r);
//   if (!session.wait.over) session.slot(r)[thread()] = mine;
//   if (sync_block_and(!session.wait.over)) session.send(1u << r);
//   session.end();
struct SendSession : Stage {
  // Counts of the chunks sent to each rank, and of the chunks that the rank has read, as this
  // thread last saw them.
  u32 sent[WORLD];
  u32 credit[WORLD];
  Wait wait;

  DEVICE SendSession(const Common& common, const Staging& staging, u32 lane)
      : Stage(common, staging, lane), wait(common) {}

  // Starts where the last call ended.
  DEVICE void begin() {
    load_counts(words(RANK)->sent, sent);
    for_each_rank([&](u32 r) { credit[r] = load_relaxed(&words(RANK)->credit[r]); });
  }

  // Returns the slot at `peer` for the next chunk that this rank sends to it.
  DEVICE Unit* slot(u32 peer) const { return slot_of(peer, RANK, sent[peer]); }

  // Returns once `peer` has read the previous chunk of `slot(peer)`, or once the wait is over. In
  // that case the thread must not write to the slot, which may have an unread chunk. Every thread
  // waits independently.
  DEVICE void await_credit(u32 peer) {
    while ((int)(sent[peer] - credit[peer]) >= (int)SLOTS) {
      credit[peer] = load_relaxed(&words(RANK)->credit[peer]);
      if ((int)(sent[peer] - credit[peer]) >= (int)SLOTS && !wait.look_again(1u << peer)) {
        return;
      }
    }
  }

  // Notifies the ranks in `peers` that the block's writes to their slots have arrived. A vote that
  // no thread's wait is over must precede it.
  DEVICE void send(u32 peers) {
    const u32 r = thread();
    if (r < WORLD) {
      fence_system();
      if (peers >> r & 1) {
        store_relaxed(&words(r)->arrived[RANK], of_thread(sent) + 1);
      }
    }
    advance(sent, peers);
  }

  // Saves the counts for the next call.
  DEVICE void end() const { save_counts(words(RANK)->sent, sent); }
};

// Session of this block as the receiver of a lane's stage: `begin`, for every chunk `receive`, read
// `slot` and `release`, then `end`. It counts the chunks, so that a slot is read only after its
// sender has written it. For example, to receive one chunk from rank r:
//   ReceiveSession session(args.common, args.staging, lane);
//   session.begin();
//   if (session.receive(1u << r)) {
//     theirs = session.slot(r)[thread()];
//     sync_block();
//     session.release(1u << r);
//   }
//   session.end();
struct ReceiveSession : Stage {
  // Counts of the chunks read from each rank.
  u32 taken[WORLD];
  Wait wait;

  DEVICE ReceiveSession(const Common& common, const Staging& staging, u32 lane)
      : Stage(common, staging, lane), wait(common) {}

  // Starts where the last call ended.
  DEVICE void begin() { load_counts(words(RANK)->taken, taken); }

  // Returns the local slot of the next chunk of rank `source`.
  DEVICE const Unit* slot(u32 source) const { return slot_of(RANK, source, taken[source]); }

  // Returns true, to the whole block, once the next chunk of every rank in `sources` has arrived.
  // Returns false if a thread's wait is over, or if `well` is false for a thread: then the slots
  // must not be read.
  DEVICE bool receive(u32 sources, bool well = true) {
    const u32 r = thread();
    if (r < WORLD) {
      const u32 mine = of_thread(taken);
      const u32* arrived = &words(RANK)->arrived[r];
      while ((sources >> r & 1) && (int)(load_acquire(arrived) - mine) <= 0 &&
             wait.look_again(1u << r)) {
      }
    }
    return sync_block_and(well && !wait.over);
  }

  // Gives the ranks in `sources` a credit for the slots that have been read. A sync_block must
  // precede it. It needs no fence: before that barrier every thread has used what it loaded, and a
  // store does not overtake a completed load.
  DEVICE void release(u32 sources) {
    const u32 r = thread();
    if (r < WORLD && (sources >> r & 1)) {
      store_relaxed(&words(r)->credit[RANK], of_thread(taken) + 1);
    }
    advance(taken, sources);
  }

  // Saves the counts for the next call.
  DEVICE void end() const { save_counts(words(RANK)->taken, taken); }
};

// Number of units that a thread moves at once for each peer, so that about 8 loads are in flight.
#define AT_ONCE (WORLD >= 7 ? 1u : WORLD >= 4 ? 2u : 4u)

// Minimum length of a chunk that is worth a fence; `MIN_CHUNK` in src/coll/cuda/plan.rs is the
// same.
#define MIN_CHUNK 4096u

// A chunk length that is the same for every message.
struct ChunkOfCall {
  static constexpr bool ONE_BY_ONE = false;
  // Start of a chunk in bytes.
  typedef u64 Start;
  u32 bytes;

  DEVICE u32 operator()(u64) const { return bytes; }
  DEVICE static Start start(u32 index, u32 chunk) { return (u64)index * chunk; }
  // Returns the offset of unit `at` of the chunk.
  DEVICE static u64 offset(Start start, u32 at) { return start + (u64)at * 16; }
};

// A chunk length for messages of different lengths, which only their two ends know: whole slots, or
// one or two chunks of equal length for each lane, if those are not too short. Both ends compute
// the same.
struct ChunkOfMessage {
  static constexpr bool ONE_BY_ONE = false;
  // Start of a chunk in steps of 256 bytes. There is one for each rank, and registers are scarce.
  typedef u32 Start;
  const Staging& staging;

  DEVICE u32 operator()(u64 bytes) const {
    const u32 lanes = staging.lanes, slot = staging.slot_bytes;
    const u32 part = quotient_up((u32)smaller(bytes, (u64)slot * 2 * lanes), lanes);
    if (part >= slot * 2) {
      return slot;
    }
    const u32 chunk = ((part > slot ? (part + 1) / 2 : part) + 511) / 512 * 512;
    const u32 least = slot < MIN_CHUNK ? slot : MIN_CHUNK;
    return chunk < least ? least : chunk < slot ? chunk : slot;
  }
  DEVICE static Start start(u32 index, u32 chunk) { return index * (chunk / START_STEP); }
  DEVICE static u64 offset(Start start, u32 at) { return (u64)start * START_STEP + (u64)at * 16; }
};

// The same chunk lengths for sends and receives. Most calls have one message, so chunks are moved
// one by one: a thread can then have more units of one chunk in flight than of several chunks.
struct ChunkOfTransfer : ChunkOfMessage {
  static constexpr bool ONE_BY_ONE = true;
};
