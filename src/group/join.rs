//! Joining a group: the ranks find each other, those of one node share memory, and then the nodes
//! are connected.
#![allow(unsafe_code, reason = "a word of a peer's memory, read to learn whether that is possible")]

use super::rejection::LocalRejections;
use super::{Group, GroupTuning, device};
use crate::bootstrap::{JoinOptions, Joined, MemberProcess};
use crate::call_queue::CallQueue;
use crate::coll::cost::hardware::DeviceKind;
use crate::coll::cost::profile;
use crate::coll::cpu::{CpuRunner, helpers};
use crate::config::{Config, InterNodeChoice};
use crate::control::{ControlBlock, Identity, ParentGroup};
use crate::cta::CtaOptions;
use crate::error::{Error, Result};
use crate::exit_watch;
use crate::health::{DeviceSlot, Health};
use crate::internode::Internode;
use crate::internode::discovery::{self, GroupLocation};
use crate::internode::join::{InternodeJoin, InternodeOptions};
use crate::mem::layout::SegmentLayout;
use crate::mem::shm::ShmSegment;
use crate::messages::Messages;
use crate::rank::Rank;
use crate::store::Store;
use crate::symm_mem::peers::PeerHeapsCell;
use crate::sync::timeout::CallTimeout;
use crate::sys::process_vm;
use crate::trace::GroupRecorder;
use crate::window;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Number of spin iterations, some 40 ns each, if every rank can have a core.
const SPINS: u32 = 512;
/// Number of spin iterations if ranks share cores: a peer may need this core to progress.
const SPINS_CROWDED: u32 = 64;
/// Value that a rank expects to find at a peer's probe address.
const PROBE: u64 = 0x746f_7263_6873_796d;

impl Group {
    /// Joins the group that `options` name and meets its other members through `store`; on several
    /// nodes only if `across` says how to connect them.
    pub fn join(
        store: &dyn Store,
        options: &JoinOptions,
        across: Option<&InternodeOptions<'_>>,
    ) -> Result<Self> {
        let choice = across.map_or(&InterNodeChoice::None, |across| &across.choice);
        match (discovery::find(store, options, choice)?, across) {
            (GroupLocation::SingleNode(joined), _) => Self::of(*joined, options, None),
            (GroupLocation::MultiNode(several), Some(across)) => {
                let joining = InternodeJoin::new(store, options, *several, across)?;
                let joined = Self::multi_node(&joining, options);
                joining.end(store, joined.as_ref().err());
                joined
            }
            (GroupLocation::MultiNode(_), None) => {
                Err(Error::internal("several nodes were not refused"))
            }
        }
    }

    fn multi_node(joining: &InternodeJoin<'_>, options: &JoinOptions) -> Result<Self> {
        let mut group =
            joining.inside(|joined, inner, part| Self::of(joined, inner, Some(part)))?;
        group.set_timeout(options.timeout());
        let joiner = group
            .connect_nodes(|health, messages, runner| joining.meet(health, messages, runner))?;
        joiner.agree(|call| group.run(std::slice::from_ref(call), Some(joining.left())))?;
        Ok(group)
    }

    /// Extends this group, all of whose ranks are on this node, to several nodes; `meet` connects
    /// it with the other nodes.
    pub(super) fn connect_nodes<T>(
        &mut self,
        meet: impl FnOnce(&Arc<Health>, &Messages, &mut CpuRunner) -> Result<(Arc<Internode>, T)>,
    ) -> Result<T> {
        let (internode, more) =
            self.queue.connect(|runner| meet(&self.health, &self.messages, runner))?;
        self.rejections = LocalRejections::new(
            &self.health,
            &self.queue,
            &self.messages,
            Some(Arc::clone(&internode)),
        );
        self.internode = Some(internode);
        Ok(more)
    }

    /// Creates the group of the ranks that have `joined` on this node: the whole group, or this
    /// node's part of it.
    fn of(joined: Joined, options: &JoinOptions, part: Option<ParentGroup>) -> Result<Self> {
        let config = Config::get();
        let (size, rank, group) = (joined.members.len(), Rank(options.rank as u32), options.name());
        let global = |r: usize| options.global_ranks.get(r).map_or(r as u32, |&g| g as u32);
        let identity =
            |(r, member): (usize, &MemberProcess)| Identity { pid: member.pid, global: global(r) };
        let members = joined.members.iter().enumerate().map(identity).collect();
        let thresholds = profile::settings(DeviceKind::Cpu, size)
            .map(|measured| measured.thresholds())
            .unwrap_or_default();
        let tuning = GroupTuning {
            zero_copy: config.cma,
            spins: config.spin,
            thresholds,
            order: options.order,
        };
        let segment = ShmSegment::map_at(joined.segment, joined.addresses)?;
        let control = control_block(segment, group, rank, members, tuning).named(part);
        let mut made = Self::with_watched(control, &joined.members, options.timeout(), tuning)?;
        made.lease = Mutex::new(joined.lease);
        made.ctas = options.ctas;
        Ok(made)
    }

    /// Creates a group in memory that its members, in rank order, already share. Their processes
    /// are not watched.
    pub fn from_joined(
        segment: ShmSegment,
        name: &str,
        rank: Rank,
        members: Vec<Identity>,
        timeout: Duration,
        tuning: GroupTuning,
    ) -> Result<Self> {
        segment.reserve(
            0,
            SegmentLayout::new(members.len()).control_bytes(),
            format_args!("group \"{name}\""),
        )?;
        Self::with_watched(
            control_block(segment, name, rank, members, tuning),
            &[],
            timeout,
            tuning,
        )
    }

    pub(super) fn with_watched(
        control: ControlBlock,
        watched: &[MemberProcess],
        timeout: Duration,
        tuning: GroupTuning,
    ) -> Result<Self> {
        let control = Arc::new(control);
        let (name, rank) = (control.name(), control.rank());
        let communicator = Arc::<DeviceSlot>::default();
        let watching = if watched.is_empty() {
            None
        } else {
            // A weak reference, so that the watcher does not keep the control block of a destroyed
            // group.
            let (listener, slot) = (Arc::downgrade(&control), Arc::downgrade(&communicator));
            let on_exit: exit_watch::OnExit = Arc::new(move |rank, how| {
                let Some(control) = listener.upgrade() else { return };
                let _ = control.contain(|| {
                    control.note_exit(rank, format!("has ended ({how})"));
                    slot.upgrade().inspect(|slot| device::release_dead(slot, rank));
                    Ok(())
                });
            });
            let reported = |error: Error| {
                let (me, size) = (control.describe(rank), control.size());
                control.fail(Error {
                    message: format!("{me} cannot join group \"{name}\" of {size} ranks: {error}"),
                    ..error
                })
            };
            Some(exit_watch::watch(watched, on_exit).map_err(reported)?)
        };
        let limit = CallTimeout::from(Instant::now(), timeout);
        let direct = meet(&control, &limit, tuning.zero_copy)?;
        let long = if direct {
            "reads long messages from the sender's memory"
        } else {
            "receives long messages in pieces"
        };
        log::info!(
            "{} joined group \"{name}\" of {} ranks and {long}",
            control.describe(rank),
            control.size()
        );
        let recorder = GroupRecorder::new(&control, timeout);
        let health = Health::new(&control, &communicator, &recorder);
        let linked = Arc::<PeerHeapsCell>::default();
        let runner = CpuRunner::new(Arc::clone(&control), tuning.thresholds, Arc::clone(&linked))
            .reading(direct);
        let queue = CallQueue::new(runner, &health);
        let messages = Messages::new(&health, direct);
        Ok(Self {
            rejections: LocalRejections::new(&health, &queue, &messages, None),
            queue,
            messages,
            health,
            recorder,
            control,
            timeout_ms: AtomicU64::new(timeout.as_millis() as u64),
            closed: AtomicBool::new(false),
            watching: Mutex::new(watching),
            lease: Mutex::default(),
            communicator,
            ctas: CtaOptions::default(),
            setting_up: Mutex::new(()),
            domains: window::Domains::default(),
            linked,
            internode: None,
        })
    }
}

pub(super) fn control_block(
    segment: ShmSegment,
    name: &str,
    rank: Rank,
    members: Vec<Identity>,
    tuning: GroupTuning,
) -> ControlBlock {
    helpers::note_ranks(members.len());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spins = tuning.spins.unwrap_or(if cores >= members.len() { SPINS } else { SPINS_CROWDED });
    ControlBlock::new(segment, rank, name.into(), members, spins).summing(tuning.order)
}

/// Waits for all members in shared memory. Returns true if every rank may read every other rank's
/// private memory.
fn meet(control: &ControlBlock, limit: &CallTimeout, try_direct: bool) -> Result<bool> {
    let me = control.rank();
    let about = || format!("joining group \"{}\"", control.name());
    let arrive = |phase: u32| {
        control.phase(me).store(phase, Ordering::Release);
        control.wake_sleepers();
        control.wait_together(limit, &about, |peer| {
            control.phase(peer).load(Ordering::Acquire) < phase
        })
    };
    let word = std::hint::black_box(Box::new(PROBE));
    control.probe(me).store(std::ptr::from_ref(&*word) as u64, Ordering::Relaxed);
    arrive(1)?;
    let readable = |peer: Rank| {
        let mut copy = [0u8; 8];
        let from = control.probe(peer).load(Ordering::Relaxed) as usize;
        // SAFETY: `copy` is a local array of 8 bytes.
        let read = unsafe {
            process_vm::read_memory(control.pid(peer), from, copy.as_mut_ptr(), copy.len())
        };
        read.is_ok() && copy == PROBE.to_ne_bytes()
    };
    control
        .can_read_peers(me)
        .store(u32::from(try_direct && control.peers().all(readable)), Ordering::Relaxed);
    arrive(2)?;
    Ok(control.ranks().all(|rank| control.can_read_peers(rank).load(Ordering::Relaxed) == 1))
}
