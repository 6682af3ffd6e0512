// Kernels that exercise the emulator itself.
#include "device.cuh"

struct PingPong {
  Unit* inbox[WORLD];
  u32* errors;
  u32 rounds;
};

// Every word of a unit carries the round, so that a torn unit is one whose words differ.
KERNEL(ping_pong, PingPong) {
  for (u32 round = 1; round <= args.rounds; round++) {
    Unit ball = {round, round, round, round};
    if (RANK == 0) store_relaxed(args.inbox[1] + thread(), ball);
    u32 torn = 0;
    for (;;) {
      Unit v = load_relaxed(args.inbox[RANK] + thread());
      bool whole = v.x == v.y && v.y == v.z && v.z == v.w;
      if (whole && v.x == round) break;
      torn += !whole;
    }
    store_relaxed(
        args.errors + RANK * threads() + thread(),
        load_relaxed(args.errors + RANK * threads() + thread()) + torn);
    if (RANK == 1) store_relaxed(args.inbox[0] + thread(), ball);
  }
}

struct Relay {
  u32* cells;
  u32* errors;
  u32 rounds;
};

// Each thread reads what its neighbour wrote before the barrier. The last thread exits early; the
// others then no longer wait for it.
KERNEL(relay, Relay) {
  u32* cells = args.cells + block() * threads();
  u32 rounds = thread() + 1 == threads() ? args.rounds / 2 : args.rounds;
  u32 next = (thread() + 1) % threads();
  for (u32 round = 1; round <= rounds; round++) {
    cells[thread()] = round;
    sync_block();
    bool left = next + 1 == threads() && round > args.rounds / 2;
    if (cells[next] != (left ? args.rounds / 2 : round)) store_relaxed(args.errors, 1);
    sync_block();
  }
}

struct Places {
  u32* seen;
};

KERNEL(places, Places) {
  after_predecessor();
  u32 at = (RANK * blocks() + block()) * threads() + thread();
  store_relaxed(args.seen + at, at + 1);
  fence_system();
  allow_successor();
}
