// Exchange of messages that all ranks know to be short: every collective that moves bytes
// unchanged, and the barrier, which is an epoch of LL lines without data. Without staging it needs
// fewer registers and less code than exchange.cu.
#include "exchange.cuh"

KERNEL(exchange_low_latency, ExchangeArgs) {
  after_predecessor();
  // step 1: blocks beyond those that use LL lines only help to copy the rank's own message
  if (block() >= args.ll_blocks) {
    keep_own(args);
    return;
  }
  // step 2: send each unit to its receiver
  LowLatencySession session(args.common, args.ll);
  session.begin();
  send_short(args, session);
  allow_successor();
  // step 3: copy the rank's own message while the others' are in flight
  keep_own(args);
  // step 4: receive each unit from its sender and store it
  receive_short(args, session);
  session.end();
}
