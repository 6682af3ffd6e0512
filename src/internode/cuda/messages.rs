//! Sends and receives of CUDA tensors: the group's kernels within a node, a backend of two ranks
//! between nodes.

use super::backends::BackendScope;
use super::watchdog::EnqueuedCall;
use super::{BACKEND_TIMEOUT_MARGIN, CudaInternode, CudaState, IntraNode};
use crate::coll::call::Span;
use crate::coll::cuda::communicator::CudaTarget;
use crate::coll::message::DeviceMessage;
use crate::coll::two_level::step::EMPTY;
use crate::error::{Error, ErrorKind, Result};
use crate::internode::Internode;
use crate::internode::traffic::TrafficPath;
use crate::kernels::cuda::driver::Stream;
use crate::rank::Rank;
use crate::sys::interrupt::Interrupts;
use crate::trace::CallTarget;
use crate::transport::Seat;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The first and the longest pause between two polls of the store for a peer.
const STORE_POLL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

impl Internode {
    /// Enqueues sends and receives that do not wait for each other; returns as `launch` does. The
    /// first message between two ranks of different nodes blocks until the other rank also starts a
    /// message with this rank.
    pub fn launch_messages(
        &self,
        inside: &dyn IntraNode,
        transfers: &[DeviceMessage],
        target: CudaTarget,
        timeout: Duration,
    ) -> Result<()> {
        let (node, size) = (self.layout.node_of(self.rank), self.layout.size());
        let (mut near, mut far, mut shown) = (Vec::new(), Vec::new(), Vec::new());
        for transfer in transfers {
            let peer = transfer.message.peer.filter(|peer| peer.index() < size);
            let peer = peer.ok_or_else(|| {
                Error::value("a transfer between GPUs needs a rank of the group as its other end")
            })?;
            if self.layout.node_of(peer) == node {
                let mut transfer = *transfer;
                transfer.message =
                    transfer.message.with_peer(Some(Rank(self.layout.local_rank(peer) as u32)));
                near.push(transfer);
            } else {
                far.push((peer, transfer.send, transfer.message.span));
                let message = transfer.message.with_peer(Some(self.global(peer)));
                shown.push(DeviceMessage { message, ..*transfer });
            }
        }
        if far.is_empty() {
            return inside.launch_intra_node(&near, target, timeout);
        }
        let cuda = self.cuda(if far[0].1 { "send" } else { "recv" })?;
        self.health.failure().map_or(Ok(()), Err)?;
        let mut state = cuda.state();
        self.meet(cuda, &mut state, &far, target, timeout)?;
        let entries = self.note_messages(&shown, target, timeout);
        let outcome = self.send_all(inside, cuda, &state, (&near, &far), target, timeout);
        outcome
            .map_err(
                |error| {
                    if error.kind == ErrorKind::Value { error } else { self.health.fail(error) }
                },
            )
            .inspect_err(|error| {
                entries.iter().for_each(|&number| {
                    self.health.recorder().end(number, &Err(error.clone()), true, "")
                })
            })
    }

    /// Records messages to or from other nodes, whose peers are global ranks, in the flight
    /// recorder; returns the numbers of their entries.
    fn note_messages(
        &self,
        messages: &[DeviceMessage],
        target: CudaTarget,
        timeout: Duration,
    ) -> Vec<u64> {
        let CudaTarget { device, stream, background } = target;
        let place = CallTarget::Cuda { device, stream, background };
        let recorder = self.health.recorder();
        let note = |transfer: &DeviceMessage| {
            recorder.message(transfer.send, &transfer.message, timeout, place, true)
        };
        messages.iter().map(note).collect()
    }

    /// Connects this rank to the ranks on other nodes to which it sends or from which it receives.
    fn meet(
        &self,
        cuda: &CudaInternode,
        state: &mut CudaState,
        far: &[(Rank, bool, Span)],
        target: CudaTarget,
        timeout: Duration,
    ) -> Result<()> {
        self.check_device(cuda, state, target.device)?;
        let peers: BTreeSet<Rank> = far
            .iter()
            .map(|&(peer, ..)| peer)
            .filter(|&peer| !cuda.connections.has(BackendScope::Pair(peer)))
            .collect();
        if state.used.is_some() && peers.is_empty() {
            return Ok(());
        }
        self.check_not_recording(target, "message between two ranks of CUDA tensors")?;
        self.use_device(cuda, state, target.device)?;
        // All ranks connect their pairs in the same order, so that the ranks of a batch do not wait
        // for each other in a cycle.
        let mut pairs: Vec<(Rank, Rank)> =
            peers.iter().map(|&peer| (self.rank.min(peer), self.rank.max(peer))).collect();
        pairs.sort();
        for (low, high) in pairs {
            let (index, peer) = if low == self.rank { (0, high) } else { (1, low) };
            let name = self.life.name("symm-cuda-pair", format_args!("{low}-{high}"));
            let seat = Seat { rank: index, size: 2, device: target.device };
            let key = |rank: Rank| format!("{name}/here/{rank}");
            let make = || {
                cuda.connections.make(
                    BackendScope::Pair(peer),
                    &name,
                    &seat,
                    timeout + BACKEND_TIMEOUT_MARGIN,
                )
            };
            let made = self
                .await_peer(cuda, [key(self.rank), key(peer)], peer, timeout)
                .and_then(|()| make());
            // The peer has read the key or no longer needs it. A store without deletion keeps it.
            let _ = cuda.store.delete(&key(self.rank));
            made.map_err(|error| self.unconnected(error, &self.layout.describe(peer)))?;
        }
        Ok(())
    }

    /// Waits until `peer`, too, is about to connect. Both ranks set one of `keys` in the store
    /// first, because a backend would wait for a missing peer forever.
    fn await_peer(
        &self,
        cuda: &CudaInternode,
        keys: [String; 2],
        peer: Rank,
        timeout: Duration,
    ) -> Result<()> {
        let [own, other] = keys;
        let (begun, mut pause, mut interrupts) = (Instant::now(), STORE_POLL.0, Interrupts::new());
        cuda.store.set(&own, b"1")?;
        while !cuda.store.check(&[&other])? {
            interrupts.check()?;
            self.health.error().map_or(Ok(()), Err)?;
            if begun.elapsed() > timeout {
                let (peer, seconds) = (self.layout.describe(peer), timeout.as_secs_f64());
                return Err(Error::timeout(format!(
                    "{peer} has begun no message with this rank for {seconds:.1} s (timeout)"
                )));
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(STORE_POLL.1);
        }
        Ok(())
    }

    fn send_all(
        &self,
        inside: &dyn IntraNode,
        cuda: &CudaInternode,
        state: &CudaState,
        (near, far): (&[DeviceMessage], &[(Rank, bool, Span)]),
        target: CudaTarget,
        timeout: Duration,
    ) -> Result<()> {
        let stream = Stream(target.stream);
        let Some(used) = &state.used else {
            return Err(Error::internal("the GPU is not connected"));
        };
        let _entered = used.device.enter()?;
        let begin = if stream.capture()?.is_none() { Some(cuda.watch.mark(stream)?) } else { None };
        let backends = &cuda.connections;
        let path = |peer: Rank| TrafficPath::CudaPair(self.global(peer));
        let exchange = || -> Result<()> {
            for &(peer, ..) in far {
                self.traffic.message(path(peer));
            }
            for batch in batches(far) {
                for (peer, give, take) in batch {
                    let own = usize::from(self.rank > peer);
                    self.traffic.add(path(peer), (give.bytes, take.bytes));
                    let (mut sent, mut received) = ([EMPTY; 2], [EMPTY; 2]);
                    (sent[1 - own], received[1 - own]) = (give, take);
                    backends.exchange(BackendScope::Pair(peer), &sent, &received)?;
                }
            }
            if near.is_empty() {
                Ok(())
            } else {
                inside.launch_intra_node(near, target, timeout + super::KERNEL_GRACE)
            }
        };
        let outcome = exchange();
        backends.finish().and(outcome)?;
        if let Some(begin) = begin {
            let end = cuda.watch.mark(stream)?;
            cuda.watch.add(EnqueuedCall {
                begin,
                end,
                since: None,
                timeout,
                call: None,
                entries: 0..0,
            });
        }
        Ok(())
    }
}

/// Splits the messages `far` into batches of `(peer, sent, received)`. A batch has at most one
/// message per peer and direction; messages of one peer and direction keep their order.
fn batches(far: &[(Rank, bool, Span)]) -> Vec<Vec<(Rank, Span, Span)>> {
    let mut batches: Vec<Vec<(Rank, Span, Span)>> = Vec::new();
    for peer in far.iter().map(|&(peer, ..)| peer).collect::<BTreeSet<_>>() {
        let of = |send: bool| {
            far.iter()
                .filter(move |other| (other.0, other.1) == (peer, send))
                .map(|&(.., span)| span)
        };
        let (sends, receives): (Vec<Span>, Vec<Span>) = (of(true).collect(), of(false).collect());
        for at in 0..sends.len().max(receives.len()) {
            let nth = |spans: &[Span]| spans.get(at).copied().unwrap_or(EMPTY);
            if batches.len() <= at {
                batches.push(Vec::new());
            }
            batches[at].push((peer, nth(&sends), nth(&receives)));
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_one_direction_follow_each_other() {
        let span = |bytes| Span { addr: 64, bytes };
        let far = [
            (Rank(3), true, span(1)),
            (Rank(1), false, span(2)),
            (Rank(3), true, span(3)),
            (Rank(3), false, span(4)),
        ];
        let first = vec![(Rank(1), EMPTY, span(2)), (Rank(3), span(1), span(4))];
        assert_eq!(batches(&far), vec![first, vec![(Rank(3), span(3), EMPTY)]]);
        assert!(batches(&[]).is_empty());
    }
}
