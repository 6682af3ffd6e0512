//! In which order the calls of one channel follow each other on the device, whatever streams they are given. Pure.

use crate::coll::cuda::layout::Channel;
use crate::kernels::cuda::driver::Stream;

/// Where the calls of each channel went last.
#[derive(Debug, Default)]
pub(super) struct Turns {
    last: [Option<Last>; Channel::ALL.len()],
}

/// A channel's last call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Last {
    /// Where it went.
    pub(super) stream: Stream,
    /// The capture that it was part of.
    pub(super) capture: Option<u64>,
    /// The channel's event has been recorded behind it.
    marked: bool,
}

/// What a call's stream has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// Nothing: the stream, or the graph, has what came before.
    Nothing,
    /// The channel's event as it was recorded.
    Event,
    /// The channel's event, to be recorded in this stream now.
    EventOf(Stream),
}

impl Turns {
    /// The next call of `channel` goes to `stream`, as part of `capture`.
    pub(super) fn next(&mut self, channel: Channel, stream: Stream, capture: Option<u64>) -> Before {
        let last = self.last[channel as usize].replace(Last { stream, capture, marked: false });
        match last.filter(|last| last.stream != stream && last.capture == capture) {
            None => Before::Nothing,
            Some(Last { marked: true, .. }) => Before::Event,
            Some(Last { stream, .. }) => Before::EventOf(stream),
        }
    }

    /// The channel's event has been recorded behind its last call.
    pub(super) fn mark(&mut self, channel: Channel) {
        if let Some(last) = &mut self.last[channel as usize] {
            last.marked = true;
        }
    }

    /// The last calls of all channels.
    pub(super) fn last(&self) -> impl Iterator<Item = &Last> {
        self.last.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Streams of a program, and the group's own.
    const OWN: usize = 3;

    #[derive(Clone, Copy, Debug)]
    enum Call {
        /// A collective on a stream of the program's.
        Sync(usize),
        /// A collective on the group's own stream, from a stream of the program's.
        Async(usize),
        /// A send or receive, likewise.
        Transfer(usize),
    }

    /// What each stream, and each channel's event, comes after.
    #[derive(Default)]
    struct Device {
        streams: [BTreeSet<usize>; OWN + 1],
        events: [BTreeSet<usize>; Channel::ALL.len()],
    }

    impl Device {
        /// As `Plane::enqueue` does it; what the call comes after.
        fn run(&mut self, turns: &mut Turns, number: usize, call: Call) -> BTreeSet<usize> {
            let (stream, transfers) = match call {
                Call::Sync(stream) => (stream, false),
                Call::Async(_) => (OWN, false),
                Call::Transfer(_) => (OWN, true),
            };
            if let Call::Async(from) | Call::Transfer(from) = call {
                let before = self.streams[from].clone();
                self.streams[OWN].extend(before);
            }
            let channel = Channel::of(false, transfers);
            let before = turns.next(channel, Stream(stream), None);
            if let Before::EventOf(Stream(last)) = before {
                self.events[channel as usize] = self.streams[last].clone();
            }
            if before != Before::Nothing {
                let event = self.events[channel as usize].clone();
                self.streams[stream].extend(event);
            }
            let after = self.streams[stream].clone();
            self.streams[stream].insert(number);
            if stream == OWN && !transfers {
                self.events[channel as usize] = self.streams[OWN].clone();
                turns.mark(channel);
            }
            after
        }
    }

    fn calls() -> impl Strategy<Value = Vec<Call>> {
        let call = prop_oneof![(0..OWN).prop_map(Call::Sync), (0..OWN).prop_map(Call::Async), (0..OWN).prop_map(Call::Transfer)];
        prop::collection::vec(call, 1..40)
    }

    proptest! {
        #[test]
        fn collectives_follow_each_other_and_wait_for_no_later_transfer(calls in calls()) {
            let (mut device, mut turns) = (Device::default(), Turns::default());
            let mut last = None;
            for (number, &call) in calls.iter().enumerate() {
                let after = device.run(&mut turns, number, call);
                if matches!(call, Call::Transfer(_)) {
                    continue;
                }
                prop_assert!(last.is_none_or(|last| after.contains(&last)), "{number} overtakes {last:?}");
                // On the program's streams: only sends and receives that the group's own stream had before one of its collectives.
                let own = calls[..number].iter().rposition(|call| matches!(call, Call::Async(_)));
                let late = |&other: &usize| matches!(calls[other], Call::Transfer(_)) && own.is_none_or(|own| other > own);
                prop_assert!(!matches!(call, Call::Sync(_)) || !after.iter().any(late), "{number} waits for a later transfer: {after:?}");
                last = Some(number);
            }
        }
    }

    #[test]
    fn eager_calls_and_captures_do_not_wait_for_each_other() {
        let mut turns = Turns::default();
        assert_eq!(turns.next(Channel::Collectives, Stream(1), None), Before::Nothing);
        assert_eq!(turns.next(Channel::CapturedCollectives, Stream(2), Some(7)), Before::Nothing);
        assert_eq!(turns.next(Channel::CapturedCollectives, Stream(3), Some(7)), Before::EventOf(Stream(2)));
        assert_eq!(turns.next(Channel::CapturedCollectives, Stream(2), Some(8)), Before::Nothing);
        assert_eq!(turns.next(Channel::Collectives, Stream(2), None), Before::EventOf(Stream(1)));
    }
}
