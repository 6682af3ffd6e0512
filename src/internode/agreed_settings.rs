//! The choices that all ranks of a multi-node group share. The ranks compare the type of partial
//! sums and the order of sums, and rank 0 sends its thresholds. All three travel in the exchange
//! that ends joining.

use super::Internode;
use super::discovery::known;
use super::reduce_dtype::ReduceDtype;
use crate::bootstrap::JoinOptions;
use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::coll::cost::hardware::DeviceKind;
use crate::coll::cost::network::RailThresholds;
use crate::coll::cost::profile;
use crate::dtype::SumOrder;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::node_map::NodeMap;
use crate::rank::Rank;
use crate::sys::fork::PerProcess;
use std::sync::Mutex;

/// The choices that all ranks of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AgreedSettings {
    pub(super) reduce_dtype: ReduceDtype,
    pub(super) order: SumOrder,
    /// Thresholds of CPU tensors.
    pub(super) thresholds: RailThresholds,
    /// Thresholds of CUDA tensors.
    pub(super) cuda: RailThresholds,
}

/// Size of the record that each rank sends.
const ENCODED_BYTES: usize = 2 + 2 * 3 * 8;

/// Thresholds on trial, which replace the thresholds of the profile.
static TRIAL_THRESHOLDS: PerProcess<Mutex<Option<RailThresholds>>> =
    PerProcess::new(Mutex::default);

/// Makes groups that this process joins from now on as rank 0 use `thresholds`; `None` restores the
/// thresholds of the profile.
///
/// # Errors
/// `Value` if the thresholds are impossible.
pub fn set_trial_thresholds(thresholds: Option<RailThresholds>) -> Result<()> {
    let checked = thresholds.map(RailThresholds::checked).transpose()?;
    *lock(TRIAL_THRESHOLDS.get()) = checked;
    Ok(())
}

/// Returns this rank's thresholds for tensors on `device` in the group that `options` name; the
/// group uses those of rank 0. They are the thresholds on trial, or those of the profile, or the
/// defaults, in this order. `here` is the number of the group's ranks on this node.
pub(super) fn thresholds(options: &JoinOptions, here: usize, device: DeviceKind) -> RailThresholds {
    if let Some(tried) = *lock(TRIAL_THRESHOLDS.get()) {
        return tried;
    }
    let own = options.global_ranks.get(options.rank as usize).copied().unwrap_or(options.rank);
    // Profiles are looked up by the number of the job's ranks on this node, even if the group has
    // fewer.
    let job = known().and_then(|known| {
        let node = &known.placements.get(own as usize)?.node;
        Some(known.placements.iter().filter(|placement| placement.node == *node).count())
    });
    let usual = if device == DeviceKind::Cuda {
        RailThresholds::DEFAULT_CUDA
    } else {
        RailThresholds::DEFAULT
    };
    profile::between_nodes(device, job.unwrap_or(here)).map_or(usual, |wire| wire.thresholds)
}

/// Checks that the group that `options` name can sum in the order that `options` choose. A tree
/// over the ranks of a node is a part of the tree over all ranks only under two conditions: every
/// node has the same number of ranks, a power of two, and these ranks are consecutive.
///
/// # Errors
/// `Config` names a node that does not meet these conditions for a tree.
pub(super) fn check_order(options: &JoinOptions, map: &NodeMap) -> Result<()> {
    let each = map.ranks_of(0).len();
    let fits = |node: &usize| {
        map.ranks_of(*node)
            .iter()
            .copied()
            .eq((0..each).map(|local| Rank((node * each + local) as u32)))
    };
    let other = if each.is_power_of_two() {
        (0..map.num_nodes()).find(|node| !fits(node))
    } else {
        Some(0)
    };
    match other {
        Some(node) if options.order == SumOrder::Tree => Err(Error::config(format!(
            "group \"{}\" cannot use order=\"tree\": on several nodes each needs the same power of \
             two of consecutive ranks, which \
             {} does not have; use order=\"rank\" or place the ranks in order",
            options.group,
            map.name_node(node)
        ))),
        Some(_) | None => Ok(()),
    }
}

impl AgreedSettings {
    /// The choices of a group before its ranks have agreed.
    pub(super) const DEFAULT: Self = Self {
        reduce_dtype: ReduceDtype::Tensor,
        order: SumOrder::Rank,
        thresholds: RailThresholds::DEFAULT,
        cuda: RailThresholds::DEFAULT_CUDA,
    };

    fn to_bytes(self) -> [u8; ENCODED_BYTES] {
        let mut bytes = [self.reduce_dtype as u8; ENCODED_BYTES];
        bytes[1] = self.order as u8;
        let words =
            |RailThresholds { multi_rail_bytes, chunk_bytes, gather_bytes }: RailThresholds| {
                [multi_rail_bytes, chunk_bytes, gather_bytes]
                    .map(|word| (word as u64).to_le_bytes())
            };
        bytes[2..]
            .copy_from_slice([self.thresholds, self.cuda].map(words).as_flattened().as_flattened());
        bytes
    }

    /// Returns the thresholds of CPU and CUDA tensors in a rank's record.
    fn thresholds_of(bytes: &[u8]) -> Option<[RailThresholds; 2]> {
        let (words, []) = bytes.get(2..)?.as_chunks::<8>() else { return None };
        let words: Vec<usize> =
            words.iter().map(|&word| u64::from_le_bytes(word) as usize).collect();
        let ([cpu, cuda], []) = words.as_chunks::<3>() else { return None };
        let checked = |&[multi_rail_bytes, chunk_bytes, gather_bytes]: &[usize; 3]| {
            RailThresholds { multi_rail_bytes, chunk_bytes, gather_bytes }.checked().ok()
        };
        Some([checked(cpu)?, checked(cuda)?])
    }
}

impl Internode {
    /// Waits until all ranks of all nodes have called this function with the same type of partial
    /// sums and the same order; `run` runs calls of the group. All ranks then use rank 0's
    /// thresholds.
    ///
    /// # Errors
    /// `Config` names a rank whose type of partial sums or order differs from that of rank 0.
    pub(super) fn agree_on(
        &self,
        chosen: AgreedSettings,
        run: impl FnOnce(&Call<'_>) -> Result<()>,
    ) -> Result<()> {
        let (mut own, mut all) = (chosen.to_bytes(), vec![0u8; self.layout.size() * ENCODED_BYTES]);
        let whole = all.as_mut_ptr().addr();
        let inputs = vec![Span { addr: own.as_mut_ptr().addr(), bytes: ENCODED_BYTES }].into();
        let outputs = (0..self.layout.size())
            .map(|rank| Span { addr: whole + rank * ENCODED_BYTES, bytes: ENCODED_BYTES })
            .collect();
        run(&Call::inner(CallSpec {
            op: Collective::AllGather,
            inputs,
            outputs,
            ..CallSpec::barrier(None)
        }))?;
        let first = &all[..ENCODED_BYTES];
        // If the node map comes from the default group, ranks of different nodes have not compared
        // their records. The order is compared before the type of partial sums, because it decides
        // that type.
        if let Some(other) =
            all.chunks_exact(ENCODED_BYTES).position(|record| record[1] != first[1])
        {
            let name = |code: u8| {
                if code == SumOrder::Tree as u8 { SumOrder::Tree } else { SumOrder::Rank }.name()
            };
            let [one, another] = [0, other].map(|rank| self.layout.describe(Rank(rank as u32)));
            let (group, a, b) = (
                self.health.control().name(),
                name(first[1]),
                name(all[other * ENCODED_BYTES + 1]),
            );
            return Err(self.health.fail(Error::config(format!(
                "ranks of group \"{group}\" chose different orders of sums: {one} has order={a:?}, \
                 {another} has order={b:?}; give \
                     torch_symm.Options(order=...) the same value on all ranks"
            ))));
        }
        if let Some(other) =
            all.chunks_exact(ENCODED_BYTES).position(|record| record[0] != first[0])
        {
            let name = |code: u8| {
                if code == ReduceDtype::Fp32 as u8 {
                    ReduceDtype::Fp32
                } else {
                    ReduceDtype::Tensor
                }
                .name()
            };
            let [one, another] = [0, other].map(|rank| self.layout.describe(Rank(rank as u32)));
            let (group, a, b) =
                (self.health.control().name(), name(first[0]), name(all[other * ENCODED_BYTES]));
            return Err(self.health.fail(Error::config(format!(
                "ranks of group \"{group}\" chose different types for sums between nodes: {one} \
                 has reduce_dtype={a:?}, {another} has \
                     reduce_dtype={b:?}; give torch_symm.Options(reduce_dtype=...) the same \
                     value on all ranks"
            ))));
        }
        let thresholds = AgreedSettings::thresholds_of(first)
            .ok_or_else(|| Error::internal("the first rank told impossible thresholds"));
        let [thresholds, cuda] = thresholds.map_err(|error| self.health.fail(error))?;
        let _ = self.chosen.set(AgreedSettings { thresholds, cuda, ..chosen });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cta::CtaOptions;
    use crate::error::ErrorKind;
    use crate::node_map::RankLocation;

    fn options(size: i32) -> JoinOptions {
        JoinOptions {
            group: "g".to_owned(),
            rank: 0,
            size,
            global_ranks: Vec::new(),
            is_default: false,
            timeout: None,
            order: SumOrder::Rank,
            ctas: CtaOptions::default(),
        }
    }

    #[test]
    fn trees_need_nodes_with_one_power_of_two_of_consecutive_ranks() {
        let rank = options(6);
        let tree = JoinOptions { order: SumOrder::Tree, ..rank.clone() };
        let map = |names: &str| {
            NodeMap::of(
                &names.chars().map(|name| RankLocation::on(&name.to_string())).collect::<Vec<_>>(),
            )
        };
        for names in ["ab", "abc", "aabb", "aabbcc", "aaaabbbb"] {
            assert_eq!(check_order(&tree, &map(names)), Ok(()), "{names}");
        }
        for (names, node) in [
            ("aaabbb", "\"a\""),
            ("abab", "\"a\""),
            ("aabbc", "\"c\""),
            ("aabccb", "\"b\""),
            ("abb", "\"b\""),
        ] {
            let error = check_order(&tree, &map(names)).expect_err("no part of the whole tree");
            assert!(
                error.kind == ErrorKind::Config
                    && error.message.contains(&format!("which node {node}")),
                "{names}: {error}"
            );
            assert_eq!(check_order(&rank, &map(names)), Ok(()), "{names}");
        }
    }

    #[test]
    fn thresholds_come_as_they_were_told() {
        let thresholds =
            RailThresholds { multi_rail_bytes: 1, chunk_bytes: 1 << 20, gather_bytes: 0 };
        let cuda = RailThresholds { chunk_bytes: 4 << 20, ..RailThresholds::DEFAULT };
        let mut bytes = AgreedSettings {
            reduce_dtype: ReduceDtype::Fp32,
            order: SumOrder::Tree,
            thresholds,
            cuda,
        }
        .to_bytes();
        assert_eq!((bytes[0], bytes[1]), (ReduceDtype::Fp32 as u8, SumOrder::Tree as u8));
        assert_eq!(AgreedSettings::thresholds_of(&bytes), Some([thresholds, cuda]));
        bytes[10] = 1;
        assert_eq!(AgreedSettings::thresholds_of(&bytes), None, "no multiple of the grain");
        assert_eq!(AgreedSettings::thresholds_of(&bytes[1..]), None);
    }

    #[test]
    fn thresholds_are_tried_out_until_that_ends() {
        let options = options(2);
        let tried = RailThresholds { multi_rail_bytes: 7, ..RailThresholds::DEFAULT };
        set_trial_thresholds(Some(tried)).expect("possible");
        assert_eq!(
            [DeviceKind::Cpu, DeviceKind::Cuda].map(|device| thresholds(&options, 1, device)),
            [tried; 2]
        );
        let error = set_trial_thresholds(Some(RailThresholds { chunk_bytes: 5, ..tried }))
            .expect_err("impossible");
        assert_eq!(error.message, "chunk_bytes is 5 bytes; from 4096 to 1073741824 are possible");
        set_trial_thresholds(None).expect("ends");
        assert_ne!(thresholds(&options, 1, DeviceKind::Cpu), tried);
    }
}
