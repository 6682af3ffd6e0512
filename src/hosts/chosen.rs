//! The choices that all ranks of a multi-node group share: the type of partial sums, which they compare, and the
//! thresholds, which rank 0 sends. Both travel in the exchange that ends joining.

use super::Hosts;
use super::finding::known;
use super::partials::Partials;
use crate::boot::JoinOptions;
use crate::coll::call::{Call, Op, Span, Spec};
use crate::coll::cost::hardware::Device;
use crate::coll::cost::profile;
use crate::coll::cost::wire::Thresholds;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::rank::Rank;
use crate::sys::fork::PerProcess;
use std::sync::Mutex;

/// The choices that all ranks of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) partials: Partials,
    /// Thresholds of CPU tensors.
    pub(super) thresholds: Thresholds,
    /// Thresholds of CUDA tensors.
    pub(super) cuda: Thresholds,
}

/// Size of the record that each rank sends.
const RECORD: usize = 1 + 2 * 3 * 8;

/// Thresholds on trial, which replace the profile's.
static TRIAL: PerProcess<Mutex<Option<Thresholds>>> = PerProcess::new(Mutex::default);

/// Makes groups that this process joins from now on as rank 0 use `thresholds`; `None` restores the profile's.
///
/// # Errors
/// `Value` if the thresholds are impossible.
pub fn try_out(thresholds: Option<Thresholds>) -> Result<()> {
    let checked = thresholds.map(Thresholds::checked).transpose()?;
    *lock(TRIAL.get()) = checked;
    Ok(())
}

/// Returns rank 0's thresholds for tensors on `device` in the group that `options` name: from the profile, or else the
/// defaults. `here` is the number of the group's ranks on this node.
pub(super) fn thresholds(options: &JoinOptions, here: usize, device: Device) -> Thresholds {
    if let Some(tried) = *lock(TRIAL.get()) {
        return tried;
    }
    let own = options.global_ranks.get(options.rank as usize).copied().unwrap_or(options.rank);
    // Profiles are looked up by the number of the job's ranks on this node, even if the group has fewer.
    let job = known().and_then(|known| {
        let host = &known.placements.get(own as usize)?.host;
        Some(known.placements.iter().filter(|placement| placement.host == *host).count())
    });
    let usual = if device == Device::Cuda { Thresholds::USUAL_CUDA } else { Thresholds::USUAL };
    profile::between_hosts(device, job.unwrap_or(here)).map_or(usual, |wire| wire.thresholds)
}

impl Chosen {
    /// The choices of a group before its ranks have agreed.
    pub(super) const USUAL: Self = Self { partials: Partials::Tensor, thresholds: Thresholds::USUAL, cuda: Thresholds::USUAL_CUDA };

    fn to_bytes(self) -> [u8; RECORD] {
        let mut bytes = [self.partials as u8; RECORD];
        let words =
            |Thresholds { one_rail, piece, gathered }: Thresholds| [one_rail, piece, gathered].map(|word| (word as u64).to_le_bytes());
        bytes[1..].copy_from_slice([self.thresholds, self.cuda].map(words).as_flattened().as_flattened());
        bytes
    }

    /// Returns the thresholds of CPU and CUDA tensors in a rank's record.
    fn thresholds_of(bytes: &[u8]) -> Option<[Thresholds; 2]> {
        let (words, []) = bytes.get(1..)?.as_chunks::<8>() else { return None };
        let words: Vec<usize> = words.iter().map(|&word| u64::from_le_bytes(word) as usize).collect();
        let ([cpu, cuda], []) = words.as_chunks::<3>() else { return None };
        let checked = |&[one_rail, piece, gathered]: &[usize; 3]| Thresholds { one_rail, piece, gathered }.checked().ok();
        Some([checked(cpu)?, checked(cuda)?])
    }
}

impl Hosts {
    /// Waits until all ranks of all nodes have called it with the same partials; `run` runs calls of the group. All
    /// ranks then use the thresholds of rank 0.
    ///
    /// # Errors
    /// `Config` names a rank whose partials differ from those of rank 0.
    pub(super) fn agree_on(&self, chosen: Chosen, run: impl FnOnce(&Call<'_>) -> Result<()>) -> Result<()> {
        let (mut own, mut all) = (chosen.to_bytes(), vec![0u8; self.layout.size() * RECORD]);
        let whole = all.as_mut_ptr().addr();
        let inputs = vec![Span { addr: own.as_mut_ptr().addr(), bytes: RECORD }].into();
        let outputs = (0..self.layout.size()).map(|rank| Span { addr: whole + rank * RECORD, bytes: RECORD }).collect();
        run(&Call::inner(Spec { op: Op::AllGather, inputs, outputs, ..Spec::barrier(None) }))?;
        let first = &all[..RECORD];
        if let Some(other) = all.chunks_exact(RECORD).position(|record| record[0] != first[0]) {
            let name = |code: u8| if code == Partials::Fp32 as u8 { Partials::Fp32 } else { Partials::Tensor }.name();
            let [one, another] = [0, other].map(|rank| self.layout.describe(Rank(rank as u32)));
            let (group, a, b) = (self.health.control().name(), name(first[0]), name(all[other * RECORD]));
            return Err(self.health.fail(Error::config(format!(
                "ranks of group \"{group}\" chose different types for sums between hosts: {one} has partials={a:?}, {another} has \
                     partials={b:?}; give torch_symm.Options(partials=...) the same value on all ranks"
            ))));
        }
        let thresholds = Chosen::thresholds_of(first).ok_or_else(|| Error::internal("the first rank told impossible thresholds"));
        let [thresholds, cuda] = thresholds.map_err(|error| self.health.fail(error))?;
        let _ = self.chosen.set(Chosen { thresholds, cuda, ..chosen });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_come_as_they_were_told() {
        let thresholds = Thresholds { one_rail: 1, piece: 1 << 20, gathered: 0 };
        let cuda = Thresholds { piece: 4 << 20, ..Thresholds::USUAL };
        let mut bytes = Chosen { partials: Partials::Fp32, thresholds, cuda }.to_bytes();
        assert_eq!((bytes[0], Chosen::thresholds_of(&bytes)), (Partials::Fp32 as u8, Some([thresholds, cuda])));
        bytes[9] = 1;
        assert_eq!(Chosen::thresholds_of(&bytes), None, "no multiple of the grain");
        assert_eq!(Chosen::thresholds_of(&bytes[1..]), None);
    }

    #[test]
    fn thresholds_are_tried_out_until_that_ends() {
        let (group, global_ranks) = ("g".to_owned(), Vec::new());
        let options = JoinOptions { group, rank: 0, size: 2, global_ranks, is_default: false, timeout: None };
        let tried = Thresholds { one_rail: 7, ..Thresholds::USUAL };
        try_out(Some(tried)).expect("possible");
        assert_eq!([Device::Cpu, Device::Cuda].map(|device| thresholds(&options, 1, device)), [tried; 2]);
        let error = try_out(Some(Thresholds { piece: 5, ..tried })).expect_err("impossible");
        assert_eq!(error.message, "piece is 5 bytes; from 4096 to 1073741824 are possible");
        try_out(None).expect("ends");
        assert_ne!(thresholds(&options, 1, Device::Cpu), tried);
    }
}
