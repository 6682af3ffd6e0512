//! Collectives on tensors in host memory.
//!
//! Every collective starts with an arrival ([`arrival`]): each rank posts the call that it was
//! asked to run, waits for all posts and compares them. No user memory is written before this
//! comparison. The rest depends on the plan: the data arrived with the posts, or move through
//! staging in a [`pipeline`], or are read in place in symmetric memory ([`zero_copy`]).

mod all_reduce;
mod all_reduce_norm;
mod arrival;
mod cma;
mod exchange;
pub(crate) mod helpers;
pub mod pipeline;
mod reduce_scatter;
mod zero_copy;

use crate::coll::all_reduce_norm::Norm;
use crate::coll::call::{Call, CallSpec, Collective};
use crate::coll::plan::{self, CpuPlan, CpuThresholds};
use crate::control::ControlBlock;
use crate::error::Result;
use crate::symm_mem::peers::{PeerHeaps, PeerHeapsCell};
use crate::sync::timeout::CallTimeout;
pub(crate) use all_reduce_norm::norm_alone;
use arrival::fits_post;
use helpers::Helpers;
use std::sync::Arc;
use std::time::Duration;

/// Runs a group's collectives, one at a time.
#[derive(Debug)]
pub struct CpuRunner {
    control: Arc<ControlBlock>,
    seq: u64,
    stage: u64,
    staging_reserved: bool,
    thresholds: CpuThresholds,
    linked: Arc<PeerHeapsCell>,
    last_algorithm: &'static str,
    /// True while, as far as this rank knows, every rank can read every other rank's memory.
    reads: bool,
    /// True if the next call has been posted.
    posted: bool,
}

/// A collective in progress.
struct CpuCall<'a> {
    control: &'a ControlBlock,
    call: &'a CallSpec<'a>,
    limit: &'a CallTimeout,
    /// True if this rank may read its peers' memory.
    reads: &'a mut bool,
    /// The group's linked symmetric memory, if its ranks have linked.
    heaps: Option<&'a PeerHeaps>,
    seq: u64,
    stage: &'a mut u64,
}

/// Returns the plan of `call` among `n` ranks.
fn choose(
    call: &CallSpec,
    longest: usize,
    n: usize,
    thresholds: &CpuThresholds,
    shared_cores: bool,
) -> CpuPlan {
    match Norm::of(call) {
        Some(norm) => plan::choose_rows(&norm, n, shared_cores),
        None => plan::choose(call.op, longest, n, thresholds, shared_cores),
    }
}

impl CpuRunner {
    /// Makes a runner for a new group, whose symmetric memory will appear in `linked`.
    pub fn new(
        control: Arc<ControlBlock>,
        thresholds: CpuThresholds,
        linked: Arc<PeerHeapsCell>,
    ) -> Self {
        Self {
            control,
            seq: 0,
            stage: 0,
            staging_reserved: false,
            thresholds,
            linked,
            last_algorithm: "",
            reads: false,
            posted: false,
        }
    }

    /// Sets whether every rank may read every other rank's memory.
    pub fn reading(self, reads: bool) -> Self {
        Self { reads, ..self }
    }

    /// Returns the group's control block.
    pub fn control(&self) -> &ControlBlock {
        &self.control
    }

    /// Returns the number of collectives started.
    pub fn sequence(&self) -> u64 {
        self.seq
    }

    /// Returns the name of the last call's algorithm, or "" if no algorithm was chosen.
    pub fn last_algorithm(&self) -> &'static str {
        self.last_algorithm
    }

    /// Posts `call` if all bytes that this rank sends fit next to the flag; the next call passed to
    /// `run` must then be this one. `begins` gets the call's number before peers see it.
    pub fn post(&mut self, call: &Call<'_>, begins: &dyn Fn(u64)) -> bool {
        let inline = fits_post(
            call,
            choose(call, call.longest(), self.control.size(), &self.thresholds, false),
        );
        if !inline || self.control.size() == 1 || self.control.failure().is_some() {
            return false;
        }
        self.seq += 1;
        begins(self.seq);
        let (control, heaps, limit) = (
            Arc::clone(&self.control),
            self.linked.get(),
            CallTimeout::from_first_wait(Duration::ZERO),
        );
        let (heaps, reads) = (heaps.as_deref(), &mut self.reads);
        CpuCall {
            control: &control,
            call,
            limit: &limit,
            reads,
            heaps,
            seq: self.seq,
            stage: &mut self.stage,
        }
        .write_post(inline);
        self.posted = true;
        true
    }

    /// Runs `call`, or the rest of it if it was posted. Returns when its outputs are complete and
    /// its inputs may change.
    pub fn run(&mut self, call: &Call<'_>, limit: &CallTimeout) -> Result<()> {
        self.last_algorithm = "";
        let posted = std::mem::take(&mut self.posted);
        if !posted {
            if let Some(failure) = self.control.failure() {
                return Err(failure);
            }
            self.seq += 1;
        }
        let (n, longest) = (self.control.size(), call.longest());
        let plan = choose(call, longest, n, &self.thresholds, false);
        let (control, heaps) = (Arc::clone(&self.control), self.linked.get());
        let (heaps, reads) = (heaps.as_deref(), &mut self.reads);
        let mut step = CpuCall {
            control: &control,
            call,
            limit,
            reads,
            heaps,
            seq: self.seq,
            stage: &mut self.stage,
        };
        if n == 1 {
            self.last_algorithm = "alone";
            return step.alone();
        }
        if !posted {
            step.write_post(fits_post(call, plan));
        }
        step.arrive()?;
        // Only the posts of all ranks tell the longest message of an all-to-all, and whether ranks
        // share cores.
        let staged = match (call.op, plan) {
            (Collective::AllToAll, _) => step.compare_lengths()?,
            (_, CpuPlan::Inline) => None,
            (_, CpuPlan::Staged { .. }) => Some(longest),
        };
        let longest = staged.unwrap_or_default();
        let shared_cores = staged.is_some() && step.cores_are_shared();
        let plan = staged.map_or(CpuPlan::Inline, |longest| {
            choose(call, longest, n, &self.thresholds, shared_cores)
        });
        if let CpuPlan::Staged { store, .. } = plan
            && step.all_offered()
        {
            self.last_algorithm = "direct";
            step.direct(store)?;
            control.finish(self.seq, call.op);
            return Ok(());
        }
        if staged.is_some() && step.reads_peers(longest, shared_cores) {
            self.last_algorithm = "read";
            if step.read_peers()? {
                control.finish(self.seq, call.op);
                return Ok(());
            }
        }
        self.last_algorithm = plan.name();
        if matches!(plan, CpuPlan::Staged { .. }) && !self.staging_reserved {
            let layout = control.layout();
            let purpose = format_args!("group \"{}\"", control.name());
            control
                .segment()
                .reserve(layout.staging(control.rank()), layout.staging_bytes(), purpose)
                .map_err(|e| control.fail(e))?;
            self.staging_reserved = true;
        }
        match call.op {
            Collective::Barrier => {}
            Collective::AllReduce | Collective::Reduce => step.all_reduce(plan)?,
            Collective::ReduceScatter => step.reduce_scatter(plan)?,
            Collective::AllReduceAddRmsNorm => {
                Norm::of(call).map_or(Ok(()), |norm| step.norm(&norm, plan))?
            }
            Collective::Broadcast
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll => step.exchange(plan, longest)?,
        }
        control.finish(self.seq, call.op);
        Ok(())
    }
}

impl CpuCall<'_> {
    /// Runs the collective of a group of one rank.
    fn alone(&self) -> Result<()> {
        match self.call.op {
            Collective::Barrier | Collective::Broadcast => {}
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                let (input, output) = (self.call.inputs[0], self.call.outputs[0]);
                self.reduce(
                    output.ptr(),
                    &[self.own(0)],
                    input.bytes,
                    crate::kernels::cpu::WriteMode::Cached,
                );
            }
            Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll => self.keep_own(&Helpers::none()),
            Collective::AllReduceAddRmsNorm => norm_alone(self.call),
        }
        Ok(())
    }

    /// Names the call in messages.
    fn about(&self) -> String {
        if let Some(asked) = self.control.parent_call() {
            return asked;
        }
        let description = crate::coll::describe::Description::of(self.call);
        let (seq, group) = (self.seq, self.control.name());
        if let Some(operator) = &self.call.compares {
            return format!("{operator}, compared by collective #{seq} of group \"{group}\"");
        }
        if self.call.op == Collective::AllToAll {
            let sent: usize = self.call.inputs.iter().map(|span| span.bytes).sum();
            return format!(
                "{description} #{seq} of group \"{group}\" (this rank sends {sent} bytes)"
            );
        }
        format!("{description} #{seq} of group \"{group}\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::Span;
    use crate::control::tests::controls;
    use crate::dtype::DType;
    use crate::error::Error;

    fn runners(n: u32) -> Vec<CpuRunner> {
        controls(n)
            .into_iter()
            .map(|control| {
                CpuRunner::new(Arc::new(control), CpuThresholds::default(), Arc::default())
            })
            .collect()
    }

    fn spans(all: &mut [Vec<i32>]) -> Vec<Span> {
        all.iter_mut()
            .map(|one| Span { addr: one.as_mut_ptr() as usize, bytes: size_of_val(&**one) })
            .collect()
    }

    fn call(op: Collective, inputs: Vec<Span>, outputs: Vec<Span>) -> Call<'static> {
        let (inputs, outputs) = (inputs.into(), outputs.into());
        Call::inner(CallSpec { op, dtype: DType::I32, inputs, outputs, ..CallSpec::barrier(None) })
    }

    fn soon() -> CallTimeout {
        CallTimeout::from_first_wait(Duration::from_secs(20))
    }

    #[test]
    fn peers_need_nothing_more_of_what_was_posted() {
        let mut runners = runners(2);
        let mut data = [vec![vec![1, 2]], vec![vec![30, 40]]];
        for (number, expected) in [(1, [31, 42]), (2, [62, 84])] {
            let calls =
                data.each_mut().map(|data| call(Collective::AllReduce, spans(data), spans(data)));
            let before = data[0][0].clone();
            let begun = std::cell::Cell::new(0);
            assert!(runners[0].post(&calls[0], &|sequence| begun.set(sequence)));
            assert_eq!((begun.get(), runners[0].sequence()), (number, number));
            runners[1].run(&calls[1], &soon()).expect("all are there");
            assert_eq!(
                (&data[0][0], &*data[1][0]),
                (&before, &expected[..]),
                "rank 0 has not been told to go on"
            );
            runners[0].run(&calls[0], &soon()).expect("all were there");
            assert_eq!((&*data[0][0], runners[0].sequence()), (&expected[..], number));
        }
    }

    #[test]
    fn what_peers_need_more_of_is_not_posted() {
        let mut long = [vec![0; 10_000]];
        let mut short = [vec![0; 10]];
        let [long, short] = [spans(&mut long), spans(&mut short)]
            .map(|spans| call(Collective::AllReduce, spans.clone(), spans));
        let mut pair = runners(2);
        assert!(!pair[0].post(&long, &|_| panic!("it does not begin")));
        assert!(!runners(1)[0].post(&short, &|_| panic!("nobody waits for it")));
        let failure = pair[0].control().fail(Error::aborted("it failed"));
        assert!(!pair[0].post(&short, &|_| panic!("the group has failed")));
        assert_eq!(pair[0].run(&short, &soon()), Err(failure));
        assert_eq!(pair[0].sequence(), 0);
    }

    // proves P7
    #[test]
    fn ranks_that_disagree_report_the_lengths_of_these_calls_and_not_of_earlier_ones() {
        let mut runners = runners(2);
        let both = |runners: &mut [CpuRunner], ops: [Collective; 2], lengths: [usize; 2]| {
            std::thread::scope(|scope| {
                let ranks = runners.iter_mut().zip(ops).enumerate().map(|(me, (runner, op))| {
                    scope.spawn(move || {
                        let mut input = [vec![0; lengths[me]]];
                        let gathers = op == Collective::AllGather;
                        let outputs = if gathers { &lengths[..] } else { &lengths[me..=me] };
                        let mut outputs: Vec<_> =
                            outputs.iter().map(|&length| vec![0; length]).collect();
                        let call = call(op, spans(&mut input), spans(&mut outputs));
                        runner.run(&call, &soon()).map_err(|error| error.message)
                    })
                });
                let ranks: Vec<_> = ranks.collect();
                ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Vec<_>>()
            })
        };
        // Two calls, because a post stays in memory until the next but one replaces it.
        for _ in 0..2 {
            assert_eq!(both(&mut runners, [Collective::AllGather; 2], [3, 4]), [Ok(()), Ok(())]);
        }
        let ops = [Collective::AllGather, Collective::AllReduce];
        for outcome in both(&mut runners, ops, [5, 5]) {
            let text = outcome.expect_err("they disagree");
            assert!(
                text.contains("all_gather(10 × int32, 40 bytes) with lengths [20, 20]"),
                "{text}"
            );
            assert!(text.ends_with("all_reduce(5 × int32, 20 bytes, SUM)"), "{text}");
        }
    }

    #[test]
    fn an_all_to_all_goes_on_where_only_one_rank_could_post() {
        let lengths = [[10, 20], [5000, 30]];
        let mut runners = runners(2);
        let mut inputs =
            [0, 1].map(|from: usize| lengths[from].map(|length| vec![from as i32 + 1; length]));
        let mut outputs = [0, 1].map(|to: usize| lengths.map(|lengths| vec![0; lengths[to]]));
        let calls: Vec<Call> = inputs
            .iter_mut()
            .zip(&mut outputs)
            .map(|(i, o)| call(Collective::AllToAll, spans(i), spans(o)))
            .collect();
        assert!(runners[0].post(&calls[0], &|_| {}) && !runners[1].post(&calls[1], &|_| {}));
        std::thread::scope(|scope| {
            for (runner, call) in runners.iter_mut().zip(&calls) {
                scope.spawn(move || runner.run(call, &soon()).expect("both run"));
            }
        });
        for (to, output) in outputs.iter().enumerate() {
            assert!(
                (0..2).all(|from| output[from] == vec![from as i32 + 1; lengths[from][to]]),
                "{to}"
            );
        }
    }
}
