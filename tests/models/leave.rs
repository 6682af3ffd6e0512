//! Leaving and aborting during calls: `Group::leave` with `CallQueue::drain`, `Group::abort`,
//! `ControlBlock::{fail, note_departure}` and the two stores of `FirstFailure::record`, while other
//! threads wait in `ControlBlock::wait_slowly`.
//!
//! All ranks make one call. Meanwhile another thread of rank 0 leaves the group, another of rank 1
//! aborts it, and one rank may exit.

use crate::{check, finds};
use stateright::{Model, Property};

const RANKS: usize = 3;
const LEAVER: usize = 0;
const ABORTER: usize = 1;

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Cause {
    Aborted,
    /// A rank left during a call.
    Dropped,
    /// This rank has left or exited without posting.
    Absent(usize),
    /// The group was closed here before the call.
    Closed,
    /// The rank that was writing the record exited between its two stores.
    Unwritten,
}

/// The word of `FirstFailure`.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Record {
    None,
    Writing(usize),
    Written(Cause),
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Thread {
    Idle,
    /// Caller: has posted, waits. Leaver: drains.
    Waiting,
    /// Has won the record, and writes it.
    Writing(Cause),
    Ok,
    Failed(Cause),
    Gone,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct State {
    callers: [Thread; RANKS],
    leaver: Thread,
    aborter: Thread,
    posted: [bool; RANKS],
    departed: bool,
    record: Record,
    deaths: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Call(usize),
    Leave,
    /// The time for which the leaver waits for its rank's calls has expired.
    Expire,
    Abort,
    Kill(usize),
}

#[derive(Clone, Copy)]
struct Leaving {
    deaths: u8,
    /// True if rank 2 makes no call: the others wait until one of them leaves or aborts.
    idle: bool,
    /// False injects a fault. The same applies to the next field.
    first_wins: bool,
    drop_is_told: bool,
}

const SOUND: Leaving = Leaving { deaths: 0, idle: false, first_wins: true, drop_is_told: true };

impl State {
    fn dead(&self, rank: usize) -> bool {
        self.callers[rank] == Thread::Gone
    }

    fn missing(&self, me: usize, peer: usize) -> bool {
        peer != me && !self.posted[peer]
    }

    /// The compare-exchange of `record`; returns true if it succeeded.
    fn claim(&mut self, rank: usize, first_wins: bool) -> bool {
        let won = self.record == Record::None || !first_wins;
        if won {
            self.record = Record::Writing(rank);
        }
        won
    }

    /// Returns the value that `FirstFailure::read` returns, or `None` while a rank is about to
    /// write the record.
    fn failure(&self) -> Option<Cause> {
        match self.record {
            Record::Written(cause) => Some(cause),
            Record::Writing(author) if self.dead(author) => Some(Cause::Unwritten),
            Record::Writing(_) | Record::None => None,
        }
    }

    fn call(&mut self, me: usize, first_wins: bool) {
        let missing = (0..RANKS).any(|peer| self.missing(me, peer));
        let absent = (0..RANKS).find(|&peer| {
            self.missing(me, peer) && (self.dead(peer) || (peer == LEAVER && self.departed))
        });
        self.callers[me] = match self.callers[me] {
            Thread::Idle if me == LEAVER && self.leaver != Thread::Idle => {
                Thread::Failed(Cause::Closed)
            }
            Thread::Idle if self.record != Record::None => {
                self.failure().map_or(Thread::Idle, Thread::Failed)
            }
            Thread::Idle => {
                self.posted[me] = true;
                Thread::Waiting
            }
            Thread::Waiting if !missing => Thread::Ok,
            Thread::Waiting if self.record != Record::None => {
                self.failure().map_or(Thread::Waiting, Thread::Failed)
            }
            Thread::Waiting => match absent {
                Some(peer) => {
                    self.claim(me, first_wins);
                    Thread::Writing(Cause::Absent(peer))
                }
                None => Thread::Waiting,
            },
            Thread::Writing(cause) => {
                self.record = Record::Written(cause);
                Thread::Failed(cause)
            }
            ended @ (Thread::Ok | Thread::Failed(_) | Thread::Gone) => ended,
        };
    }

    fn leave(&mut self) {
        self.leaver = match self.leaver {
            Thread::Idle => Thread::Waiting,
            Thread::Waiting
                if matches!(self.callers[LEAVER], Thread::Waiting | Thread::Writing(_)) =>
            {
                Thread::Waiting
            }
            Thread::Writing(cause) => {
                self.record = Record::Written(cause);
                self.departed = true;
                Thread::Ok
            }
            Thread::Waiting => {
                self.departed = true;
                Thread::Ok
            }
            ended @ (Thread::Ok | Thread::Failed(_) | Thread::Gone) => ended,
        };
    }

    fn abort(&mut self, first_wins: bool) {
        self.aborter = match self.aborter {
            Thread::Writing(cause) => {
                self.record = Record::Written(cause);
                Thread::Ok
            }
            Thread::Idle => {
                if self.claim(ABORTER, first_wins) {
                    Thread::Writing(Cause::Aborted)
                } else {
                    Thread::Ok
                }
            }
            ended @ (Thread::Waiting | Thread::Ok | Thread::Failed(_) | Thread::Gone) => ended,
        };
    }
}

impl Model for Leaving {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let idle = Thread::Idle;
        let (posted, record) = ([false; RANKS], Record::None);
        vec![State {
            callers: [idle; RANKS],
            leaver: idle,
            aborter: idle,
            posted,
            departed: false,
            record,
            deaths: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let callers = RANKS - usize::from(self.idle);
        actions.extend((0..callers).filter(|&me| !state.dead(me)).map(Action::Call));
        if !state.dead(LEAVER) {
            actions.extend([Action::Leave, Action::Expire]);
        }
        if !state.dead(ABORTER) && state.aborter != Thread::Ok {
            actions.push(Action::Abort);
        }
        if state.deaths < self.deaths {
            actions.extend((0..RANKS).map(Action::Kill));
        }
        actions.retain(|&action| self.next_state(state, action).is_some());
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Call(me) => state.call(me, self.first_wins),
            Action::Leave => state.leave(),
            Action::Expire
                if state.leaver == Thread::Waiting && state.callers[LEAVER] == Thread::Waiting =>
            {
                // `ControlBlock::fail` returns once a failure is recorded; then the leaver leaves
                // the group.
                state.leaver = if self.drop_is_told && state.claim(LEAVER, self.first_wins) {
                    Thread::Writing(Cause::Dropped)
                } else {
                    state.departed = true;
                    Thread::Ok
                };
            }
            Action::Expire => {}
            Action::Abort => state.abort(self.first_wins),
            Action::Kill(victim) => {
                state.deaths += 1;
                state.callers[victim] = Thread::Gone;
            }
        }
        Some(state).filter(|next| next != last)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nobody is blocked for ever", |model: &Self, state: &State| {
                let mut actions = Vec::new();
                model.actions(state, &mut actions);
                // An abort that has started must finish; one that has not is optional.
                actions.retain(|&action| {
                    !matches!(action, Action::Kill(_))
                        && (action != Action::Abort || state.aborter != Thread::Idle)
                });
                let ended = |thread: Thread| {
                    matches!(thread, Thread::Idle | Thread::Ok | Thread::Failed(_) | Thread::Gone)
                };
                !actions.is_empty() || state.callers.into_iter().all(ended)
            }),
            Property::always("one cause wins", |_, state: &State| {
                state.callers.into_iter().all(|caller| match caller {
                    Thread::Failed(Cause::Closed) => true,
                    Thread::Failed(Cause::Unwritten) => {
                        matches!(state.record, Record::Writing(author) if state.dead(author))
                    }
                    Thread::Failed(cause) => state.record == Record::Written(cause),
                    _ => true,
                })
            }),
            Property::always("a success had everybody's data", |_, state: &State| {
                state.posted.iter().all(|&posted| posted) || !state.callers.contains(&Thread::Ok)
            }),
            Property::sometimes("the call succeeds", |model: &Self, state: &State| {
                model.idle || state.callers == [Thread::Ok; RANKS]
            }),
            Property::sometimes("the abort wins", |_, state: &State| {
                state.record == Record::Written(Cause::Aborted)
            }),
            Property::sometimes("the leaver drops its call", |_, state: &State| {
                state.record == Record::Written(Cause::Dropped)
            }),
        ]
    }
}

#[test]
fn leaving_and_aborting_release_everybody_with_one_cause() {
    assert!(check(SOUND) > 100);
    check(Leaving { idle: true, ..SOUND });
}

#[test]
fn they_do_even_if_the_winner_dies_while_it_writes() {
    assert!(check(Leaving { deaths: 1, ..SOUND }) > 1000);
}

#[test]
fn the_model_sees_a_second_winner_and_a_call_that_is_dropped_silently() {
    finds(Leaving { first_wins: false, ..SOUND }, "one cause wins");
    finds(Leaving { idle: true, drop_is_told: false, ..SOUND }, "nobody is blocked for ever");
}
