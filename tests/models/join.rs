//! Joining: `bootstrap::join`, then the rendezvous in shared memory (`meet` of `group::join`).
//!
//! | step | code |
//! |---|---|
//! | `Publish` | `bootstrap::claim::RankClaim::publish`, with `refuse_living` |
//! | `Look` | `bootstrap::collect_records::{gather, read, judge}`; `began` and `at` replace times: is a record new? |
//! | `Greet`, `Listen` | `bootstrap::member::{greet, ask, next_record}` |
//! | `Hear`, `Notice`, `HandOver`, `Answer` | `bootstrap::coordinator::SegmentDistribution` |
//! | `Meet`, `Watch` | `meet` over `ControlBlock::wait_for_peers`; `exit_watch` |

use crate::{check, finds};
use stateright::{Model, Property};

/// Number of ranks; process `i` is rank `i`, and one more process claims to be rank 1.
const RANKS: usize = 3;

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Cause {
    Died(usize),
    Late,
    Twice,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Step {
    Absent,
    Begun,
    Published,
    Gathered,
    /// Connected to rank 0, and has sent its hello.
    Greeted,
    /// Rank 0 sends answers; this rank is next.
    Handing(usize),
    Meeting,
    Joined,
    /// The watcher has reported an exit to this process.
    Told,
    Failed(Cause),
    Dead,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct Process {
    number: usize,
    step: Step,
    began: u8,
    /// Processes whose records this process has seen while they were alive.
    seen: u8,
    /// True if it has replaced a record of an earlier attempt.
    again: bool,
    /// The members of the group that it joins: at index i, the process that is rank i.
    members: [usize; RANKS],
}

/// The record under a rank's key.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
struct Entry {
    by: usize,
    at: u8,
    failed: Option<Cause>,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Answer {
    Memory,
    Refusal(Cause),
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct State {
    processes: Vec<Process>,
    keys: [Option<Entry>; RANKS],
    answers: Vec<Option<Answer>>,
    /// Bit mask of the processes whose hello rank 0 has received.
    seated: u8,
    /// Bit mask of the ranks that have reached the rendezvous; their bits stay set after they exit.
    met: u8,
    clock: u8,
    deaths: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Begin(usize),
    Publish(usize),
    Look(usize),
    Greet(usize),
    Hear(usize),
    Notice,
    HandOver,
    Answer,
    Listen(usize),
    Meet(usize),
    Watch(usize),
    Kill(usize),
    Deadline(usize),
}

#[derive(Clone, Copy)]
struct Join {
    deaths: u8,
    missing: Option<usize>,
    /// True if a second process claims to be rank 1.
    twice: bool,
    /// False injects a fault. The same applies to the next field.
    claims_are_checked: bool,
    leader_watches: bool,
}

const SOUND: Join =
    Join { deaths: 0, missing: None, twice: false, claims_are_checked: true, leader_watches: true };

impl State {
    fn any(&self, holds: impl FnMut(&Process) -> bool) -> bool {
        self.processes.iter().any(holds)
    }

    /// Returns true if at most one process of each number is in a step that `such` accepts.
    fn one_of_each(&self, such: impl Fn(Step) -> bool) -> bool {
        (0..RANKS).all(|number| {
            let holds = |process: &&Process| process.number == number && such(process.step);
            self.processes.iter().filter(holds).count() < 2
        })
    }

    fn lives(&self, process: usize) -> bool {
        !matches!(self.processes[process].step, Step::Dead | Step::Absent)
    }

    /// As in `Published::fail` and, for rank 0, `SegmentDistribution::reject_all`.
    fn fail(&mut self, process: usize, cause: Cause) {
        self.clock += 1;
        let (number, clock) = (self.processes[process].number, self.clock);
        self.processes[process].step = Step::Failed(cause);
        if let Some(entry) = self.keys[number].as_mut().filter(|entry| entry.by == process) {
            *entry = Entry { by: process, at: clock, failed: Some(cause) };
        }
        if process == 0 {
            for (other, answer) in self.answers.iter_mut().enumerate().skip(1) {
                if self.processes[other].step == Step::Greeted && answer.is_none() {
                    *answer = Some(Answer::Refusal(cause));
                }
            }
        }
    }

    /// The cause that an exited or failed `process` has left, as `failure_of` and `end_of` find it.
    fn cause_of(&self, process: usize) -> Cause {
        let entry = self.keys[self.processes[process].number].filter(|entry| entry.by == process);
        entry.and_then(|entry| entry.failed).unwrap_or(match self.processes[process].step {
            Step::Failed(cause) => cause,
            _ => Cause::Died(process),
        })
    }

    /// As in `judge`: an error, a live process, or none.
    fn judge(&self, me: usize, entry: Entry) -> Result<Option<usize>, Cause> {
        let fresh = entry.at >= self.processes[me].began;
        let lives = self.lives(entry.by);
        match entry.failed {
            Some(cause) if fresh || (lives && !self.processes[me].again) => Err(cause),
            Some(_) => Ok(None),
            None if lives => Ok(Some(entry.by)),
            None if fresh || self.processes[me].seen & 1 << entry.by != 0 => {
                Err(self.cause_of(entry.by))
            }
            None => Ok(None),
        }
    }

    fn look(&mut self, me: usize) {
        let mut members = [usize::MAX; RANKS];
        for (number, member) in members.iter_mut().enumerate() {
            match self.keys[number].map(|entry| self.judge(me, entry)) {
                Some(Err(cause)) => return self.fail(me, cause),
                Some(Ok(Some(process))) => {
                    *member = process;
                    self.processes[me].seen |= 1 << process;
                }
                Some(Ok(None)) | None => {}
            }
        }
        if members.iter().all(|&process| process != usize::MAX) {
            self.processes[me].members = members;
            self.processes[me].step = Step::Gathered;
        }
    }

    fn publish(&mut self, me: usize, checked: bool) {
        let Process { number, began, .. } = self.processes[me];
        if let Some(entry) = self.keys[number] {
            if checked && entry.failed.is_none() && self.lives(entry.by) {
                // The process was rejected, so its record was never published.
                self.processes[me].step = Step::Failed(Cause::Twice);
                return;
            }
            self.processes[me].again = true;
        }
        self.keys[number] = Some(Entry { by: me, at: began, failed: None });
        self.processes[me].step = Step::Published;
    }

    fn greet(&mut self, me: usize) {
        match self.processes[0].step {
            Step::Dead => self.fail(me, self.cause_of(0)),
            // Rank 0 no longer listens; its next record gives the reason.
            Step::Failed(cause) => self.fail(me, cause),
            _ => self.processes[me].step = Step::Greeted,
        }
    }

    fn hear(&mut self, guest: usize) {
        let number = self.processes[guest].number;
        if self.processes[0].members[number] == guest {
            self.seated |= 1 << guest;
        } else {
            self.answers[guest] = Some(Answer::Refusal(Cause::Twice));
        }
    }

    /// A member that rank 0 finds exited or failed.
    fn left(&self) -> Option<usize> {
        self.processes[0].members.into_iter().skip(1).find(|&member| self.has_ended(member))
    }

    fn has_ended(&self, process: usize) -> bool {
        matches!(self.processes[process].step, Step::Dead | Step::Failed(_))
    }

    fn answer(&mut self, number: usize) {
        let member = self.processes[0].members[number];
        if self.has_ended(member) {
            return self.fail(0, self.cause_of(member));
        }
        self.answers[member] = Some(Answer::Memory);
        self.processes[0].step = Step::Handing(number + 1);
        if number + 1 == RANKS {
            self.meeting(0);
        }
    }

    fn meeting(&mut self, process: usize) {
        self.processes[process].step = Step::Meeting;
        self.met |= 1 << process;
    }

    fn listen(&mut self, me: usize) {
        match self.answers[me] {
            Some(Answer::Memory) => {
                self.keys[self.processes[me].number] = None;
                self.meeting(me);
            }
            Some(Answer::Refusal(cause)) => self.fail(me, cause),
            None if self.processes[0].step == Step::Dead => self.fail(me, self.cause_of(0)),
            None => {}
        }
    }

    fn meet(&mut self, me: usize) {
        let missing: Vec<usize> = self.processes[me]
            .members
            .into_iter()
            .filter(|member| self.met & 1 << member == 0)
            .collect();
        if missing.is_empty() {
            self.processes[me].step = Step::Joined;
        } else if let Some(&dead) =
            missing.iter().find(|&&member| self.processes[member].step == Step::Dead)
        {
            self.processes[me].step = Step::Failed(Cause::Died(dead));
        }
    }
}

impl Join {
    fn apply(&self, last: &State, action: Action) -> State {
        let mut state = last.clone();
        match action {
            Action::Begin(me) => {
                state.clock += 1;
                state.processes[me].began = state.clock;
                state.processes[me].step = Step::Begun;
            }
            Action::Publish(me) => state.publish(me, self.claims_are_checked),
            Action::Look(me) => state.look(me),
            Action::Greet(me) => state.greet(me),
            Action::Hear(guest) => state.hear(guest),
            Action::Notice => {
                if let Some(member) = state.left() {
                    state.fail(0, state.cause_of(member));
                }
            }
            Action::HandOver => {
                state.keys[0] = None;
                state.processes[0].step = Step::Handing(1);
            }
            Action::Answer => {
                if let Step::Handing(number) = state.processes[0].step {
                    state.answer(number);
                }
            }
            Action::Listen(me) => state.listen(me),
            Action::Meet(me) => state.meet(me),
            Action::Watch(me) => state.processes[me].step = Step::Told,
            Action::Kill(victim) => {
                state.deaths += 1;
                state.processes[victim].step = Step::Dead;
            }
            Action::Deadline(me) => state.fail(me, Cause::Late),
        }
        state
    }

    /// The steps of the processes, without deadlines.
    fn steps(&self, state: &State) -> Vec<Action> {
        let mut actions = Vec::new();
        for (me, process) in state.processes.iter().enumerate() {
            match process.step {
                Step::Absent if self.missing != Some(me) => actions.push(Action::Begin(me)),
                Step::Begun => actions.push(Action::Publish(me)),
                Step::Published => actions.push(Action::Look(me)),
                Step::Gathered if me == 0 => {
                    let received = |guest: usize| {
                        state.seated & 1 << guest != 0 || state.answers[guest].is_some()
                    };
                    let guests = (1..state.processes.len()).filter(|&guest| {
                        state.processes[guest].step == Step::Greeted && !received(guest)
                    });
                    actions.extend(guests.map(Action::Hear));
                    let seated = process
                        .members
                        .iter()
                        .skip(1)
                        .all(|member| state.seated & 1 << member != 0);
                    if state.left().is_some() {
                        actions.extend(self.leader_watches.then_some(Action::Notice));
                    } else if seated {
                        actions.push(Action::HandOver);
                    }
                }
                Step::Gathered => actions.push(Action::Greet(me)),
                Step::Greeted => actions.push(Action::Listen(me)),
                Step::Handing(_) => actions.push(Action::Answer),
                Step::Meeting => actions.push(Action::Meet(me)),
                Step::Joined
                    if process
                        .members
                        .iter()
                        .any(|&other| state.processes[other].step == Step::Dead) =>
                {
                    actions.push(Action::Watch(me));
                }
                Step::Absent | Step::Joined | Step::Told | Step::Failed(_) | Step::Dead => {}
            }
        }
        actions.retain(|&action| self.apply(state, action) != *state);
        actions
    }
}

fn waits(step: Step) -> bool {
    !matches!(step, Step::Absent | Step::Joined | Step::Told | Step::Failed(_) | Step::Dead)
}

impl Model for Join {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let process = |number| Process {
            number,
            step: Step::Absent,
            began: 0,
            seen: 0,
            again: false,
            members: [usize::MAX; RANKS],
        };
        let mut processes: Vec<Process> = (0..RANKS).map(process).collect();
        processes.extend(self.twice.then(|| process(1)));
        let answers = vec![None; processes.len()];
        vec![State {
            processes,
            keys: [None; RANKS],
            answers,
            seated: 0,
            met: 0,
            clock: 0,
            deaths: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let steps = self.steps(state);
        let waiting = |me: &usize| waits(state.processes[*me].step);
        if steps.is_empty() {
            // The deadline of rank 0 expires before or after the others: both orders are checked.
            actions.extend((0..state.processes.len()).filter(waiting).map(Action::Deadline));
        }
        actions.extend(steps);
        if state.deaths < self.deaths {
            actions
                .extend((0..state.processes.len()).filter(|&me| state.lives(me)).map(Action::Kill));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        Some(self.apply(last, action)).filter(|next| next != last)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nobody is left waiting", |model: &Self, state: &State| {
                let mut actions = Vec::new();
                model.actions(state, &mut actions);
                !actions.is_empty() || state.processes.iter().all(|process| !waits(process.step))
            }),
            Property::always("no two ranks of one number", |_, state: &State| {
                state.one_of_each(|step| matches!(step, Step::Meeting | Step::Joined | Step::Told))
            }),
            Property::always("no two claims of one number", |_, state: &State| {
                let claims =
                    |step| matches!(step, Step::Published | Step::Gathered | Step::Greeted);
                state.one_of_each(claims)
            }),
            Property::always("who is said to have died has", |_, state: &State| {
                state.processes.iter().all(|process| match process.step {
                    Step::Failed(Cause::Died(other)) => state.processes[other].step == Step::Dead,
                    _ => true,
                })
            }),
            Property::always("nobody fails without a cause", |model: &Self, state: &State| {
                let sound = model.deaths == 0 && model.missing.is_none() && !model.twice;
                !sound || !state.any(|process| matches!(process.step, Step::Failed(_)))
            }),
            // If a process's record is older than a survivor's call, it counts as a leftover once
            // the process has exited, and may be replaced.
            Property::always(
                "a death that all survivors could see costs no deadline",
                |model: &Self, state: &State| {
                    let excused = model.missing.is_some() || model.twice;
                    let late = state.any(|process| process.step == Step::Failed(Cause::Late));
                    let dead = |process: usize| state.processes[process].step == Step::Dead;
                    let unseen = |me: &Process| {
                        (0..RANKS).any(|other| dead(other) && me.seen & 1 << other == 0)
                    };
                    excused
                        || !late
                        || state.any(|process| process.step != Step::Dead && unseen(process))
                },
            ),
            Property::sometimes("some outcome is an end", |_, state: &State| {
                state.any(|process| matches!(process.step, Step::Joined | Step::Failed(_)))
            }),
        ]
    }
}

#[test]
fn ranks_that_live_join() {
    assert!(check(SOUND) > 100);
}

#[test]
fn a_death_at_any_step_is_told_to_all_survivors() {
    assert!(check(Join { deaths: 1, ..SOUND }) > 1000);
}

#[test]
fn a_rank_that_never_comes_ends_the_wait_of_all() {
    for missing in 0..RANKS {
        check(Join { missing: Some(missing), ..SOUND });
        check(Join { missing: Some(missing), deaths: 1, ..SOUND });
    }
}

#[test]
fn of_two_claimants_one_joins() {
    check(Join { twice: true, deaths: 1, ..SOUND });
}

#[test]
fn the_model_sees_an_unchecked_claim_and_a_leader_that_does_not_look() {
    finds(Join { twice: true, claims_are_checked: false, ..SOUND }, "no two claims of one number");
    finds(
        Join { deaths: 1, leader_watches: false, ..SOUND },
        "a death that all survivors could see costs no deadline",
    );
}
