//! Collectives with an exit: `coll::cpu::arrival` over `ControlBlock::wait_slowly`,
//! `ControlBlock::trouble`, `ControlBlock::note_departure` and `FirstFailure`.
//!
//! A rank posts call `k`, waits until all have posted it, and continues with the next. While it
//! waits it checks its peers, the failure record and the absent ranks. Each check is a separate
//! step, as in `trouble`, so all events between two checks are among the orders.

use crate::{check, finds};
use stateright::{Model, Property};

const RANKS: usize = 3;
const CALLS: u8 = 2;

/// The rank that never arrives, and the call that it has not posted.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
struct Loss {
    rank: usize,
    call: u8,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Step {
    /// Between calls.
    Idle,
    Waiting,
    /// The first check found that some rank has not posted its call.
    Missing,
    /// The second check then found this failure on record.
    Failure(Loss),
    /// The second check found no failure, and this peer has not posted.
    Suspects(usize),
    /// The third check found that this peer has exited.
    Gone(usize),
    Failed(Loss),
    Done,
    Dead,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct State {
    steps: [Step; RANKS],
    posted: [u8; RANKS],
    /// For each rank, a bit mask of the ranks whose exit its watcher has reported.
    reported: [u8; RANKS],
    /// Number of calls that each rank has completed.
    succeeded: [u8; RANKS],
    failure: Option<Loss>,
    deaths: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Step(usize),
    Suspect(usize, usize),
    Tell(usize, usize),
    Kill(usize),
}

#[derive(Clone, Copy)]
struct Calls {
    deaths: u8,
    /// True if a rank checks again for missing posts after it has seen an exit or a failure.
    looks_again: bool,
    /// True if the watcher reports exits.
    watches: bool,
}

const SOUND: Calls = Calls { deaths: 1, looks_again: true, watches: true };

impl State {
    fn missing(&self, me: usize, peer: usize) -> bool {
        peer != me && self.posted[peer] < self.posted[me]
    }

    fn any_missing(&self, me: usize) -> bool {
        (0..RANKS).any(|peer| self.missing(me, peer))
    }

    fn fail(&mut self, me: usize, loss: Loss) {
        let stands = *self.failure.get_or_insert(loss);
        self.steps[me] = Step::Failed(stands);
    }

    fn step(&mut self, me: usize, looks_again: bool) {
        match self.steps[me] {
            // A failed group starts no calls.
            Step::Idle => match self.failure {
                Some(loss) => self.steps[me] = Step::Failed(loss),
                None => {
                    self.posted[me] += 1;
                    self.steps[me] = Step::Waiting;
                }
            },
            Step::Waiting if self.any_missing(me) => self.steps[me] = Step::Missing,
            Step::Waiting => {
                self.succeeded[me] = self.posted[me];
                self.steps[me] = if self.posted[me] == CALLS { Step::Done } else { Step::Idle };
            }
            Step::Missing => self.steps[me] = self.failure.map_or(Step::Waiting, Step::Failure),
            Step::Failure(loss) if !looks_again || self.any_missing(me) => {
                self.steps[me] = Step::Failed(loss)
            }
            Step::Suspects(peer) if self.reported[me] & 1 << peer != 0 => {
                self.steps[me] = Step::Gone(peer)
            }
            Step::Gone(peer) if !looks_again || self.missing(me, peer) => {
                self.fail(me, Loss { rank: peer, call: self.posted[me] })
            }
            Step::Failure(_) | Step::Suspects(_) | Step::Gone(_) => self.steps[me] = Step::Waiting,
            Step::Failed(_) | Step::Done | Step::Dead => {}
        }
    }
}

impl Calls {
    fn able(state: &State, me: usize) -> bool {
        match state.steps[me] {
            // A check that finds nothing new changes no state, so it is not a step.
            Step::Waiting => !state.any_missing(me) || state.failure.is_some(),
            Step::Failed(_) | Step::Done | Step::Dead => false,
            Step::Idle | Step::Missing | Step::Failure(_) | Step::Suspects(_) | Step::Gone(_) => {
                true
            }
        }
    }
}

impl Model for Calls {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let none = [0; RANKS];
        vec![State {
            steps: [Step::Idle; RANKS],
            posted: none,
            reported: none,
            succeeded: none,
            failure: None,
            deaths: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for me in 0..RANKS {
            if Self::able(state, me) {
                actions.push(Action::Step(me));
            }
            for peer in 0..RANKS {
                if state.steps[me] == Step::Waiting && state.missing(me, peer) {
                    actions.push(Action::Suspect(me, peer));
                }
                if self.watches
                    && state.steps[me] != Step::Dead
                    && state.steps[peer] == Step::Dead
                    && state.reported[me] & 1 << peer == 0
                {
                    actions.push(Action::Tell(me, peer));
                }
            }
            if state.deaths < self.deaths && state.steps[me] != Step::Dead {
                actions.push(Action::Kill(me));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Step(me) => state.step(me, self.looks_again),
            Action::Suspect(me, peer) => state.steps[me] = Step::Suspects(peer),
            Action::Tell(me, peer) => state.reported[me] |= 1 << peer,
            Action::Kill(me) => {
                state.steps[me] = Step::Dead;
                state.deaths += 1;
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("all survivors end", |model: &Self, state: &State| {
                let ended = |me: usize| {
                    matches!(state.steps[me], Step::Failed(_) | Step::Done | Step::Dead)
                };
                let reported = |me: usize| {
                    (0..RANKS)
                        .any(|peer| state.missing(me, peer) && state.reported[me] & 1 << peer != 0)
                };
                let news = |me: usize| {
                    model.watches
                        && (0..RANKS).any(|peer| {
                            state.steps[peer] == Step::Dead && state.reported[me] & 1 << peer == 0
                        })
                };
                let idle =
                    |me: usize| ended(me) || (!Self::able(state, me) && !reported(me) && !news(me));
                !(0..RANKS).all(idle) || (0..RANKS).all(ended)
            }),
            Property::always("a success had everybody's data", |_, state: &State| {
                (0..RANKS)
                    .all(|me| state.posted.iter().all(|&posted| posted >= state.succeeded[me]))
            }),
            Property::always(
                "a failure names one that died and did not come",
                |_, state: &State| {
                    state.failure.is_none_or(|loss| {
                        state.steps[loss.rank] == Step::Dead && state.posted[loss.rank] < loss.call
                    })
                },
            ),
            Property::always("a call that all have reached fails nowhere", |_, state: &State| {
                (0..RANKS).all(|me| {
                    let call = state.posted[me];
                    let reached = state.posted.iter().all(|&posted| posted >= call);
                    !matches!(state.steps[me], Step::Failed(_))
                        || state.succeeded[me] == call
                        || !reached
                })
            }),
            Property::sometimes("all calls succeed", |_, state: &State| {
                state.steps.iter().all(|&step| step == Step::Done)
            }),
            Property::sometimes("all survivors fail", |model: &Self, state: &State| {
                model.deaths == 0
                    || state.steps.iter().filter(|step| matches!(step, Step::Failed(_))).count()
                        == RANKS - 1
            }),
        ]
    }
}

#[test]
fn every_survivor_of_a_death_ends_and_the_dead_rank_is_named() {
    assert!(check(SOUND) > 1000);
}

#[test]
fn without_a_death_all_calls_succeed() {
    check(Calls { deaths: 0, ..SOUND });
}

#[test]
fn the_model_sees_a_look_that_is_not_repeated_and_a_death_without_news() {
    finds(Calls { looks_again: false, ..SOUND }, "a call that all have reached fails nowhere");
    finds(Calls { looks_again: false, ..SOUND }, "a failure names one that died and did not come");
    finds(Calls { watches: false, ..SOUND }, "all survivors end");
}
