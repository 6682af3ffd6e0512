//! Steps of a plan, and their order in a long call, which goes in chunks: while the transfers of one are on the wire, the GPU works on its
//! neighbours. Pure.

use super::backends::Transfer;
use super::cast::Cast;
use super::sum::Sum;
use crate::coll::call::{Call, Span};

/// One step of a plan.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Collectives of the ranks of this host.
    Inside(Vec<Call<'static>>),
    /// A transfer on this rank's rail; `beside` what follows, or before it.
    Rail { transfer: Transfer, beside: bool },
    /// The oldest transfer beside what followed has ended.
    Follow,
    /// Messages with ranks of other hosts.
    Exchange { give: Vec<Span>, take: Vec<Span> },
    /// Sum of the hosts' partial results.
    Sum(Sum),
    /// Copy in another type.
    Cast(Cast),
    /// Copy within the device.
    Copy { from: Span, to: Span },
}

/// Steps of a chunk: those that end in its transfers on the wire, and those that need what these bring.
pub(super) type Halves = [Vec<Step>; 2];

/// The steps of all `chunks`. The first half of each comes before the second of the one before it, so memory of neighbours lies apart.
pub(super) fn overlapped(chunks: impl IntoIterator<Item = Halves>) -> Vec<Step> {
    let (mut steps, mut open) = (Vec::new(), Vec::new());
    for [before, after] in chunks {
        let begun = before.iter().filter(|step| matches!(step, Step::Rail { .. })).count();
        steps.extend(before.into_iter().map(beside));
        steps.append(&mut open);
        open.resize_with(begun, || Step::Follow);
        open.extend(after);
    }
    steps.append(&mut open);
    steps
}

/// `step`, where what comes next does not wait for it.
fn beside(step: Step) -> Step {
    match step {
        Step::Rail { transfer, .. } => Step::Rail { transfer, beside: true },
        Step::Inside(_) | Step::Exchange { .. } | Step::Follow | Step::Sum(_) | Step::Cast(_) | Step::Copy { .. } => step,
    }
}
