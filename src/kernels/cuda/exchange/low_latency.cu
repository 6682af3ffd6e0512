// Exchange of messages that are all short, as all ranks know: every collective that moves bytes unchanged, and the barrier, which is an epoch
// of LL lines without data. Without staging it needs fewer registers and less code than exchange.cu.
#include "exchange.cuh"

KERNEL(exchange_low_latency, ExchangeArgs) {
  after_predecessor();
  exchange_short(args, true);
}
