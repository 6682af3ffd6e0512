//! Set-up of the GPUs of a group, in steps that all ranks take together.

use super::copies::CopyStreams;
use super::{Communicator, CommunicatorState, KernelReport, StreamOrder, stream_order};
use crate::bootstrap::fd_exchange::Mailbox;
use crate::coll::cost::{hardware, profile};
use crate::coll::cuda::agreement::launch_log;
use crate::coll::cuda::failure::abort_flag::AbortFlag;
use crate::coll::cuda::kernels::Kernels;
use crate::coll::cuda::plan::CudaThresholds;
use crate::coll::cuda::workspace::budget;
use crate::coll::cuda::workspace::layout::{Channel, ChannelLayout, MAX_RANKS};
use crate::coll::cuda::workspace::memory::{
    LocalWorkspace, PeerInfo, PeerWorkspaces, SetupContext,
};
use crate::coll::cuda::{cube_mesh, peer_access};
use crate::config::Config;
use crate::control::ControlBlock;
use crate::cta::CtaOptions;
use crate::dtype::SumOrder;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::cuda::driver::{Device, Entered, Event, OwnStream, RelaxedCapture, Stream};
use crate::rank::Rank;
use crate::symm_mem::peers::{self, AllGather, PeerHeaps};
use crate::symm_mem::{self, Heap};
use crate::sync::timeout::CallTimeout;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The resources that a rank opens before it reports to the others; they are freed in this order.
struct OpenedWorkspaces {
    stream: OwnStream,
    entered: Entered,
    capture: RelaxedCapture,
    mailbox: Mailbox,
    heap: Option<Arc<Heap>>,
    processors: u64,
    device: Device,
}

/// Runs one step of the set-up, which all ranks take; see [`peers::step`].
fn step(
    gather: &AllGather<'_>,
    control: &ControlBlock,
    bytes: usize,
    own: Result<Vec<u8>>,
) -> Result<Vec<Vec<u8>>> {
    peers::step(gather, control, "use its GPU in", bytes, own)
}

impl Communicator {
    /// Sets up the group's GPUs. All ranks call it, each with its own device, and it fails on all
    /// ranks or none.
    pub fn connect(
        control: &Arc<ControlBlock>,
        device: i32,
        ctas: CtaOptions,
        limit: &CallTimeout,
        gather: &AllGather<'_>,
    ) -> Result<Self> {
        let (config, me, n) = (Config::get(), control.rank().index(), control.size());
        let begun = Instant::now();
        let measured = profile::settings(hardware::DeviceKind::Cuda, n);
        let usual = measured
            .and_then(|group| CudaThresholds::of(n).overlaid(&group.cuda_tuning).ok())
            .unwrap_or(CudaThresholds::of(n));
        let tuning = usual.overlaid(&config.cuda_tuning).unwrap_or_else(|complaint| {
            log::warn!("SYMM_CUDA_TUNING: {complaint}; ignored");
            usual
        });
        let tuning = tuning.within(ctas);
        // Everything that can fail on one rank only is done before a step, so that no rank waits
        // for a rank that has failed.
        let opened = || {
            if n > MAX_RANKS {
                return Err(Error::config(format!(
                    "a group of {n} ranks cannot use GPUs; {MAX_RANKS} is the most"
                )));
            }
            let device = Device::open(device)?;
            let mailbox = Mailbox::open(n)?;
            launch_log::reserve(control)?;
            let capture = RelaxedCapture::begin()?;
            let entered = device.enter()?;
            // Without a heap the group stages everything.
            let heap = (config.p2p && n > 1).then(|| {
                symm_mem::of(device.ordinal()).inspect_err(|error| log::info!("{error}")).ok()
            });
            let processors = device.processors()? as u64;
            Ok(OpenedWorkspaces {
                stream: OwnStream::new()?,
                entered,
                capture,
                mailbox,
                heap: heap.flatten(),
                processors,
                device,
            })
        };
        let opened = opened();
        let messages = opened.as_ref().map_err(Clone::clone).map(
            |OpenedWorkspaces { device, mailbox, heap, processors, .. }| {
                let workspace = budget::offer(config.workspace_mb << 20) as u64;
                let heap = heap.as_ref().map(|heap| heap.address());
                // Devices before Hopper have no clusters.
                let (processors, clusters) = (*processors, device.capability.0 >= 9);
                PeerInfo {
                    uuid: device.uuid,
                    mailbox: mailbox.name(),
                    workspace,
                    p2p: config.p2p,
                    heap,
                    tuning,
                    processors,
                    clusters,
                }
                .encode()
            },
        );
        let peers = step(gather, control, PeerInfo::BYTES, messages)?;
        let peers: Option<Vec<PeerInfo>> =
            peers.iter().map(|bytes| PeerInfo::decode(bytes)).collect();
        let peers = peers.ok_or_else(|| Error::internal("a peer's description is cut short"))?;
        let OpenedWorkspaces { stream, entered, capture: _capture, mailbox, heap, device, .. } =
            opened?;
        if !config.shared_gpus {
            reject_shared(control, &peers)?;
        }
        reject_other_tunings(control, &peers)?;
        // The blocks of a row, and of a lane, need their counterparts on every device.
        let processors = peers.iter().map(|peer| peer.processors as usize).min().unwrap_or(1);
        let tuning = tuning.on(processors, peers.iter().all(|peer| peer.clusters));
        let bytes = peers
            .iter()
            .map(|peer| peer.workspace as usize)
            .min()
            .unwrap_or(0)
            .min(ChannelLayout::most(n))
            .max(ChannelLayout::least(n));
        let layout = ChannelLayout::new(n, bytes)?;
        let way =
            SetupContext { control, device: &device, mailbox: &mailbox, peers: &peers, limit };
        let mut memory = None;
        if peers.iter().all(|peer| peer.p2p) {
            let own = LocalWorkspace::on_device(&device, bytes);
            // If a GPU has too little memory, the group fails. If a GPU cannot share its memory,
            // the group uses host memory.
            let lacking =
                own.as_ref().err().filter(|error| error.kind == ErrorKind::Config).cloned();
            step(gather, control, 0, lacking.map_or(Ok(Vec::new()), Err))?;
            memory = try_out(gather, &way, own, &layout, stream.stream(), &|_| true)?;
        }
        let memory = match memory {
            Some(memory) => memory,
            None => {
                log::warn!(
                    "group \"{}\": its GPUs exchange through the host's memory, since some cannot \
                     reach each other's",
                    control.name()
                );
                try_out(
                    gather,
                    &way,
                    LocalWorkspace::on_host(bytes),
                    &layout,
                    stream.stream(),
                    &|_| true,
                )?
                .ok_or_else(|| {
                    Error::config(format!(
                        "the GPUs of group \"{}\" cannot exchange, not even through the host",
                        control.name()
                    ))
                })?
            }
        };
        let edges = edges(&way, gather, &memory, stream.stream())?;
        let events = || (0..stream_order::PLACES).map(|_| Event::new()).collect::<Result<Vec<_>>>();
        let mut kernels = Kernels::new(&device, n, me, tuning.overlap != 0, control.order());
        kernels.preload(&device);
        let made = || {
            Ok((
                AbortFlag::of(control)?,
                KernelReport::new(control)?,
                events()?,
                CopyStreams::new()?,
            ))
        };
        let made = made();
        step(gather, control, 0, made.as_ref().map_err(Clone::clone).map(|_| Vec::new()))?;
        let (stop, report, behind, copies) = made?;
        let symmetric = if memory.is_direct() && n > 1 {
            let requested = Arc::downgrade(&report);
            let failed: symm_mem::FailureCheck = Arc::new(move || {
                requested.upgrade().is_some_and(|report| report.failure().is_some())
            });
            let addresses: Vec<_> = peers.iter().map(|peer| peer.heap).collect();
            let linked = PeerHeaps::link(
                control,
                &|bytes, own| step(gather, control, bytes, own),
                heap.as_ref(),
                &addresses,
                &failed,
                limit,
            )?;
            let staged = |reason: &_| {
                log::warn!(
                    "group \"{}\": tensors in symmetric memory are staged, since {reason}",
                    control.name()
                )
            };
            linked.inspect_err(staged).ok()
        } else {
            None
        };
        drop(entered);
        control.set_kernel_progress(launch_log::progress);
        let state = CommunicatorState {
            kernels,
            copies,
            order: StreamOrder::default(),
            launched: 0,
            transfers: [[0; MAX_RANKS]; 2],
            behind,
            closed: false,
            recorded: false,
        };
        let (mebibytes, place) = (
            bytes >> 20,
            if memory.is_direct() { "on each GPU" } else { "of the host for each GPU" },
        );
        log::info!(
            "group \"{}\": {mebibytes} MiB {place}, this rank's is cuda:{} ({}); \
             ready after {:.0} ms",
            control.name(),
            device.ordinal(),
            device.bus,
            begun.elapsed().as_secs_f64() * 1e3
        );
        let apart = edges.as_ref().is_some_and(|edges| edges.apart.is_some());
        let share =
            budget::BudgetShare::take(bytes + if apart { ChannelLayout::least(n) } else { 0 });
        let bases = memory.addresses();
        let peer = Channel::ALL.map(|channel| {
            let mut begins = [0; MAX_RANKS];
            begins
                .iter_mut()
                .zip(&bases)
                .for_each(|(address, base)| *address = base + layout.channel(channel) as u64);
            begins
        });
        let (control, state) = (Arc::clone(control), Mutex::new(state));
        Ok(Self {
            control,
            layout,
            tuning,
            own_queues: !Config::get().one_gpu_queue,
            state,
            report,
            stop,
            symmetric,
            edges,
            memory,
            peer,
            _share: share,
            _stream: stream,
            device,
        })
    }
}

/// Returns the memory of the ranks that this rank `reaches`. `None` unless every rank has created
/// its memory and can access the memory of all ranks that it reaches.
fn try_out(
    gather: &AllGather<'_>,
    way: &SetupContext<'_>,
    own: Result<LocalWorkspace>,
    layout: &ChannelLayout,
    stream: Stream,
    reaches: &dyn Fn(usize) -> bool,
) -> Result<Option<PeerWorkspaces>> {
    let me = way.control.rank().index();
    let all = |yes: bool| {
        step(gather, way.control, 1, Ok(vec![u8::from(yes)]))
            .map(|answers| answers.iter().all(|answer| answer[0] == 1))
    };
    let noted = |error: Error| log::info!("{error}");
    let own = own.map_err(noted);
    // Before any rank waits for a descriptor from another, the ranks agree that all have created
    // their memory.
    if !all(own.is_ok())? {
        return Ok(None);
    }
    let share = |own: LocalWorkspace| {
        let memory = PeerWorkspaces::shared(way, own, reaches)?;
        memory.clear(me, layout, stream)?;
        Ok(memory)
    };
    let made = own.and_then(|own| share(own).map_err(noted)).ok();
    if !all(made.is_some())? {
        return Ok(None);
    }
    let Some(memory) = made else { return Ok(None) };
    // The test is skipped if every rank knows from an earlier group that access works for all of
    // its pairs.
    let pairs: Vec<_> =
        way.peers.iter().enumerate().filter(|&(rank, _)| rank != me && reaches(rank)).collect();
    let pairs: Vec<_> = pairs.into_iter().map(|(_, peer)| (way.device.uuid, peer.uuid)).collect();
    if all(memory.is_direct() && peer_access::know(&pairs))? {
        return Ok(Some(memory));
    }
    if !all(memory.probe(me, layout, stream).unwrap_or(false))? {
        return Ok(None);
    }
    let works = all(memory.probed(me, layout, stream).unwrap_or(false))?;
    if works && memory.is_direct() {
        peer_access::note(&pairs);
    }
    Ok(works.then_some(memory))
}

/// Returns the edges of the group's GPUs, if all ranks detect the same hybrid cube mesh and can use
/// it.
fn edges(
    way: &SetupContext<'_>,
    gather: &AllGather<'_>,
    memory: &PeerWorkspaces,
    stream: Stream,
) -> Result<Option<cube_mesh::Edges>> {
    let (control, me) = (way.control, way.control.rank().index());
    // The cube mesh algorithm adds the ranks of each quad first, so its order of additions depends
    // on the links and is not the tree.
    if control.order() == SumOrder::Tree
        || way.peers.len() != cube_mesh::RANKS
        || !way.peers.iter().all(|peer| peer.p2p)
    {
        return Ok(None);
    }
    let mesh = cube_mesh::detected(way.peers);
    let own = cube_mesh::encoded(mesh.as_ref());
    let messages = step(gather, control, cube_mesh::BYTES, Ok(own.clone()))?;
    if messages.iter().any(|other| *other != own) {
        log::warn!(
            "group \"{}\": ranks report different GPU topologies; the topology is ignored",
            control.name()
        );
        return Ok(None);
    }
    let Some(mesh) = mesh else { return Ok(None) };
    log::info!(
        "group \"{}\": its GPUs are a hybrid cube mesh of ranks {:?} and {:?}",
        control.name(),
        mesh.quad[0],
        mesh.quad[1]
    );
    if memory.is_direct() {
        return Ok(Some(cube_mesh::Edges { mesh, apart: None }));
    }
    let bytes = ChannelLayout::least(cube_mesh::RANKS);
    let layout = ChannelLayout::new(cube_mesh::RANKS, bytes)?;
    let memory = try_out(
        gather,
        way,
        LocalWorkspace::on_device(way.device, bytes),
        &layout,
        stream,
        &|rank| cube_mesh::reaches(&mesh, me, rank),
    )?;
    Ok(memory.map(|memory| cube_mesh::Edges { mesh, apart: Some((memory, layout)) }))
}

fn reject_shared(control: &ControlBlock, peers: &[PeerInfo]) -> Result<()> {
    for (rank, peer) in control.ranks().zip(peers) {
        if let Some((other, _)) =
            control.ranks().zip(peers).find(|(other, them)| *other < rank && them.uuid == peer.uuid)
        {
            let (one, two, group) =
                (control.describe(other), control.describe(rank), control.name());
            let uuid: String = peer.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
            return Err(Error::config(format!(
                "{one} and {two} of group \"{group}\" use the same GPU ({uuid}); each rank needs \
                 its own: call torch.cuda.set_device(local_rank) first"
            )));
        }
    }
    Ok(())
}

/// Fails if ranks have different tunings, because they would choose different kernels for one call.
fn reject_other_tunings(control: &ControlBlock, peers: &[PeerInfo]) -> Result<()> {
    let Some((rank, other)) =
        control.ranks().zip(peers).find(|(_, peer)| peer.tuning != peers[0].tuning)
    else {
        return Ok(());
    };
    let (one, two, group) = (control.describe(Rank(0)), control.describe(rank), control.name());
    Err(Error::config(format!(
        "{one} and {two} of group \"{group}\" differ in SYMM_CUDA_TUNING, SYMM_COST_PROFILE, or \
         the cta_policy and max_ctas of torch_symm.Options (SYMM_CTA_POLICY, SYMM_MAX_CTAS): \
         {:?} and {:?}; set them alike on all ranks",
        peers[0].tuning, other.tuning
    )))
}
