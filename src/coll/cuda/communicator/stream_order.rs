//! Stream order: which calls run one after another on the device, whichever streams they use. Pure.

use crate::error::{Error, Result};
use crate::kernels::cuda::driver::Stream;

/// A class of calls that run one after another. Calls that are recorded into one graph are ordered
/// only among themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamQueue {
    Collectives,
    Sends,
    Receives,
}

/// Number of queues, if a queue's eager calls and its captured calls count separately.
pub(super) const PLACES: usize = 6;

/// Returns the index of a queue, eager or captured.
pub(super) fn slot(queue: StreamQueue, capture: Option<u64>) -> usize {
    2 * queue as usize + usize::from(capture.is_some())
}

/// The last call of each queue, eager and captured.
#[derive(Debug, Default)]
pub(super) struct StreamOrder {
    last: [Option<LastLaunch>; PLACES],
}

/// A queue's last call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LastLaunch {
    /// The stream of the call.
    pub(super) stream: Stream,
    /// The capture that recorded the call.
    pub(super) capture: Option<u64>,
    /// True if the queue's event has been recorded after the call.
    marked: bool,
}

/// The work for which a call's stream has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dependency {
    /// Nothing: the order of the stream, or of the graph, suffices.
    Nothing,
    /// The queue's event, which has already been recorded.
    Event,
    /// The queue's event, which must first be recorded in this stream.
    EventOf(Stream),
}

impl StreamOrder {
    /// Notes that the next call of `queue` uses `stream`, as part of `capture`; returns the work
    /// for which that call has to wait. `recording` returns the capture that records a stream now.
    ///
    /// Fails, and notes nothing, if a graph now records the stream of the queue's last call, but
    /// did not record that call. An event of that stream would draw `stream` into the graph, and
    /// the call would be recorded instead of run.
    pub(super) fn next(
        &mut self,
        queue: StreamQueue,
        stream: Stream,
        capture: Option<u64>,
        recording: impl FnOnce(Stream) -> Result<Option<u64>>,
    ) -> Result<Dependency> {
        let last = &mut self.last[slot(queue, capture)];
        let before = match last.filter(|last| last.stream != stream && last.capture == capture) {
            None => Dependency::Nothing,
            Some(LastLaunch { marked: true, .. }) => Dependency::Event,
            Some(LastLaunch { stream, .. }) if recording(stream)? == capture => {
                Dependency::EventOf(stream)
            }
            Some(_) => {
                return Err(Error::value(
                    "the group's previous call was on another stream, which a CUDA graph records \
                     now, so this call cannot wait for it: before the capture, make the last call \
                     on a stream that is not captured, or make this call after the capture",
                ));
            }
        };
        *last = Some(LastLaunch { stream, capture, marked: false });
        Ok(before)
    }

    /// Notes that the queue's event has been recorded after its last call.
    pub(super) fn mark(&mut self, queue: StreamQueue, capture: Option<u64>) {
        if let Some(last) = &mut self.last[slot(queue, capture)] {
            last.marked = true;
        }
    }

    /// Returns the last calls of all queues.
    pub(super) fn last(&self) -> impl Iterator<Item = &LastLaunch> {
        self.last.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Number of the program's streams, which have the first indices. The group's streams for
    /// sends, for receives and for all other calls have the next indices.
    const PROGRAM: usize = 3;
    const SENDS: usize = 3;
    const RECEIVES: usize = 4;
    const OWN: usize = 5;
    const STREAMS: usize = 6;

    #[derive(Clone, Copy, Debug)]
    enum StreamCall {
        /// A collective on a stream of the program.
        Sync(usize),
        /// A collective on the group's stream, called from a stream of the program.
        Async(usize),
        /// Sends and receives in one call, on the group's stream like `Async`.
        Batch(usize),
        Send(usize),
        Receive(usize),
        /// The sends of a block that also has collectives, on the group's stream like `Async`.
        SendInBlock(usize),
    }

    /// Model of a device: the calls after which each stream, and the event of each queue, is
    /// ordered.
    #[derive(Default)]
    struct DeviceModel {
        streams: [BTreeSet<usize>; STREAMS],
        events: [BTreeSet<usize>; PLACES],
        /// For each queue, its last call and all calls that precede this call.
        exact: [BTreeSet<usize>; PLACES],
    }

    impl DeviceModel {
        /// Enqueues a call as `Communicator::enqueue` does; returns the calls that it is ordered
        /// after, and the calls that it should be ordered after.
        fn run(
            &mut self,
            order: &mut StreamOrder,
            number: usize,
            call: StreamCall,
        ) -> [BTreeSet<usize>; 2] {
            let (from, stream, queues): (usize, usize, &[StreamQueue]) = match call {
                StreamCall::Sync(from) => (from, from, &[StreamQueue::Collectives]),
                StreamCall::Async(from) => (from, OWN, &[StreamQueue::Collectives]),
                StreamCall::Batch(from) => {
                    (from, OWN, &[StreamQueue::Sends, StreamQueue::Receives])
                }
                StreamCall::Send(from) => (from, SENDS, &[StreamQueue::Sends]),
                StreamCall::Receive(from) => (from, RECEIVES, &[StreamQueue::Receives]),
                StreamCall::SendInBlock(from) => (from, OWN, &[StreamQueue::Sends]),
            };
            let before = self.streams[from].clone();
            self.streams[stream].extend(before);
            let mut exact = self.streams[stream].clone();
            for &queue in queues {
                let before =
                    order.next(queue, Stream(stream), None, |_| Ok(None)).expect("no capture");
                let queue = slot(queue, None);
                if let Dependency::EventOf(Stream(last)) = before {
                    self.events[queue] = self.streams[last].clone();
                }
                if before != Dependency::Nothing {
                    self.streams[stream].extend(self.events[queue].iter());
                }
                exact.extend(self.exact[queue].iter());
            }
            let after = self.streams[stream].clone();
            self.streams[stream].insert(number);
            for &queue in queues {
                if stream >= PROGRAM {
                    self.events[slot(queue, None)] = self.streams[stream].clone();
                    order.mark(queue, None);
                }
                self.exact[slot(queue, None)] = &exact | &BTreeSet::from([number]);
            }
            [after, exact]
        }
    }

    fn calls() -> impl Strategy<Value = Vec<StreamCall>> {
        let from = || 0..PROGRAM;
        let collective =
            prop_oneof![from().prop_map(StreamCall::Sync), from().prop_map(StreamCall::Async)];
        let transfer = prop_oneof![
            from().prop_map(StreamCall::Batch),
            from().prop_map(StreamCall::Send),
            from().prop_map(StreamCall::Receive),
            from().prop_map(StreamCall::SendInBlock)
        ];
        prop::collection::vec(prop_oneof![collective, transfer], 1..40)
    }

    proptest! {
        #[test]
        fn a_call_comes_after_its_queue_and_its_stream_and_nothing_else(calls in calls()) {
            let (mut device, mut order) = (DeviceModel::default(), StreamOrder::default());
            for (number, &call) in calls.iter().enumerate() {
                let [after, exact] = device.run(&mut order, number, call);
                prop_assert_eq!(after, exact, "call {}", number);
            }
        }
    }

    #[test]
    fn eager_calls_and_captures_do_not_wait_for_each_other() {
        let mut order = StreamOrder::default();
        let mut next = |stream, capture| {
            let recording = |_| Ok(capture);
            order
                .next(StreamQueue::Collectives, Stream(stream), capture, recording)
                .expect("in order")
        };
        assert_eq!(next(1, None), Dependency::Nothing);
        assert_eq!(next(2, Some(7)), Dependency::Nothing);
        assert_eq!(next(3, Some(7)), Dependency::EventOf(Stream(2)));
        assert_eq!(next(2, Some(8)), Dependency::Nothing);
        assert_eq!(next(2, None), Dependency::EventOf(Stream(1)));
    }

    #[test]
    fn a_call_is_rejected_while_a_graph_records_the_stream_of_the_last_eager_call() {
        const WARM: Stream = Stream(1);
        let (mut order, queue) = (StreamOrder::default(), StreamQueue::Collectives);
        // The capture, if any, that records the stream of the first call.
        let mut next = |stream, capture, warm: Option<u64>| {
            order.next(queue, stream, capture, |stream| Ok(warm.filter(|_| stream == WARM)))
        };
        assert_eq!(next(WARM, None, None), Ok(Dependency::Nothing));
        assert_eq!(next(WARM, Some(7), Some(7)), Ok(Dependency::Nothing));
        for _ in 0..2 {
            let error = next(Stream(2), None, Some(7)).expect_err("captured");
            assert_eq!(error.kind, ErrorKind::Value, "{error}");
            assert!(error.message.contains("a CUDA graph records"), "{error}");
        }
        assert_eq!(next(Stream(2), None, None), Ok(Dependency::EventOf(WARM)), "after the capture");
        assert_eq!(next(Stream(3), None, Some(8)), Ok(Dependency::EventOf(Stream(2))));
    }

    #[test]
    fn every_queue_has_a_place() {
        let all = [StreamQueue::Collectives, StreamQueue::Sends, StreamQueue::Receives];
        let places: BTreeSet<usize> = all
            .iter()
            .flat_map(|&queue| [None, Some(1)].map(|capture| slot(queue, capture)))
            .collect();
        assert!(places.into_iter().eq(0..PLACES));
    }
}
