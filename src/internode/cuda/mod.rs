//! CUDA tensors of multi-node groups: the group's kernels within each node, and a backend of torch,
//! NCCL, between nodes.
//!
//! Everything is enqueued in stream order and nothing waits for a GPU, except for the first call,
//! which connects the ranks. A call is a program ([`two_level`](crate::coll::two_level)), whose
//! steps follow each other on the caller's stream.
//!
//! - [`backends`](mod@backends): torch's backends
//! - [`sum`]: the kernel that adds partial sums; [`cast`]: the kernels that widen and round
//! - [`messages`](mod@messages): sends and receives; [`watchdog`](mod@watchdog): timeouts, and the
//!   end of calls that wait for a failed node

mod backends;
pub mod cast;
mod enqueue;
mod messages;
pub mod sum;
mod watchdog;

use super::Internode;
use super::header::CallHeader;
use crate::coll::all_reduce_norm;
use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::coll::cuda::communicator::{Communicator, CudaTarget};
use crate::coll::describe::Description;
use crate::coll::message;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::cuda::driver::{Device, Event, Stream};
use crate::lock::lock;
use crate::rank::Rank;
use crate::store::Store;
use crate::sys::fork;
use crate::sys::thread::aside;
use crate::trace::{self, InternodePhase};
use crate::transport::{Seat, Transports};
use backends::{BackendScope, Connections};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use sum::MAX_NODES;
use watchdog::{EnqueuedCall, Watchdog, WatchdogThread};

/// How much longer the timeout of intra-node kernels is than the timeout of the call: a rank that
/// waits for another node knows which node is late, and must fail the group first.
const KERNEL_GRACE: Duration = Duration::from_secs(1);
/// How much longer a backend's own timeout is than the group's, because NCCL's timeout ends the
/// process.
const BACKEND_TIMEOUT_MARGIN: Duration = Duration::from_secs(600);

/// How long leaving waits until the backends have ended.
const BACKEND_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The functions of a group that its inter-node part needs for calls on CUDA tensors.
pub trait IntraNode {
    /// Runs a call of the whole group on CPU tensors.
    fn run_call(&self, call: &Call<'_>, timeout: Duration) -> Result<()>;

    /// Returns the communicator of this node's GPUs. The first call sets up this rank's part of it
    /// on `device`, and blocks until all ranks of this node have made this call.
    fn gpus(&self, device: i32) -> Result<Arc<Communicator>>;

    /// Enqueues messages among the ranks of this node; peers are local ranks.
    fn launch_intra_node(
        &self,
        transfers: &[message::DeviceMessage],
        target: CudaTarget,
        timeout: Duration,
    ) -> Result<()>;
}

/// A group's GPUs and their connections to other nodes.
pub(super) struct CudaInternode {
    connections: Arc<Connections>,
    store: Arc<dyn Store>,
    state: Mutex<CudaState>,
    watch: Arc<Watchdog>,
    closed: AtomicBool,
    generation: u64,
}

#[derive(Default)]
struct CudaState {
    used: Option<DeviceState>,
    /// True once the GPUs of this node and the rail are connected.
    connected: bool,
    /// Number of collectives launched.
    collectives: u64,
}

/// A device in use.
struct DeviceState {
    device: Device,
    /// The last call outside graphs, and the last one in a graph.
    last: [Option<LastEnqueued>; 2],
    /// Events recorded after these two calls.
    behind: [Event; 2],
}

#[derive(Clone, Copy, PartialEq)]
struct LastEnqueued {
    stream: Stream,
    capture: Option<u64>,
}

impl CudaInternode {
    /// Creates the state of a group. Ranks of different nodes that exchange messages meet in
    /// `store`.
    pub(super) fn new(transports: Arc<dyn Transports>, store: Arc<dyn Store>) -> Self {
        Self {
            connections: Arc::new(Connections::new(transports)),
            store,
            state: Mutex::default(),
            watch: Arc::default(),
            closed: AtomicBool::new(false),
            generation: fork::generation(),
        }
    }

    fn state(&self) -> MutexGuard<'_, CudaState> {
        // A panic that leaves this state half-changed fails the group.
        lock(&self.state)
    }

    /// Releases the backends once the enqueued calls have ended; aborts the calls that are still
    /// running after `limit`.
    pub(super) fn close(&self, limit: Duration) {
        if self.generation != fork::generation() || self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let used = self.state().used.take();
        let Some(used) = used else { return };
        let idle = self.watch.close(limit);
        if !idle {
            self.connections.abort();
        }
        let connections = Arc::clone(&self.connections);
        aside("symm-nccl-end", BACKEND_CLOSE_TIMEOUT, move || connections.close());
        drop(used);
    }
}

impl Internode {
    /// Enqueues `calls` in order and returns at once, except that the first call also waits until
    /// all ranks have set up their GPUs.
    pub fn launch(
        &self,
        inside: &dyn IntraNode,
        calls: &[Call<'_>],
        target: CudaTarget,
        timeout: Duration,
    ) -> Result<()> {
        all_reduce_norm::reject_multi_node(calls)?;
        let cuda = self.cuda(
            &calls.first().map_or_else(String::new, |call| Description::of(call).to_string()),
        )?;
        self.health.failure().map_or(Ok(()), Err)?;
        let needed = if calls.iter().any(|call| exchanges(call.op)) {
            BackendScope::All
        } else {
            BackendScope::Rail
        };
        let mut state = cuda.state();
        self.connected(inside, cuda, &mut state, target, needed, timeout)?;
        let headers =
            (state.collectives + 1..).zip(calls).map(|(number, call)| CallHeader::of(call, number));
        state.collectives += calls.len() as u64;
        if Config::get().debug_call_site && Stream(target.stream).capture()?.is_none() {
            headers
                .clone()
                .zip(calls)
                .try_for_each(|(header, call)| self.compare(inside, header, call, timeout))?;
        }
        self.health.recorder().ask(calls.len());
        // Nodes compare these calls while they run; the kernels compare the calls within a node.
        if self.layout.local_rank(self.rank) == 0 {
            self.current.launched(headers);
        }
        let entries = self.note(calls, state.collectives, target, timeout);
        let first = state.collectives + 1 - calls.len() as u64;
        let outcome = self.in_order(
            cuda,
            &mut state,
            target,
            timeout,
            (calls.first().map(|call| (Description::of(call), first)), entries.clone()),
            |device, stream| {
                calls.iter().try_for_each(|call| {
                    self.enqueue(inside, cuda, call, (device, stream), target, timeout)
                })
            },
        );
        outcome.inspect_err(|error| {
            entries.for_each(|number| {
                self.health.recorder().end(number, &Err(error.clone()), true, "")
            })
        })
    }

    /// Records `calls`, which end with collective number `last`, in the flight recorder; returns
    /// the numbers of their entries.
    fn note(&self, calls: &[Call], last: u64, target: CudaTarget, timeout: Duration) -> Range<u64> {
        let (recorder, CudaTarget { device, stream, background }) =
            (self.health.recorder(), target);
        let place = trace::CallTarget::Cuda { device, stream, background };
        let first = recorder.schedule(calls, timeout, background, place);
        let (entries, phase) =
            (first..first + calls.len() as u64, InternodePhase::Enqueued(self.rail_number()));
        for (entry, sequence) in entries.clone().zip(last + 1 - calls.len() as u64..) {
            recorder.start(entry, sequence);
            recorder.phase(entry, phase);
        }
        entries
    }

    /// Returns the number of this rank's rail, if it has one.
    fn rail_number(&self) -> Option<u16> {
        let local = self.layout.local_rank(self.rank);
        (local < self.layout.num_rails()).then_some(local as u16)
    }

    /// Blocks the calling thread until all ranks of all nodes were found to run the same call.
    /// `launch` calls this only under `SYMM_DEBUG=call_site`; otherwise `launch` blocks only for
    /// the set-up.
    fn compare(
        &self,
        inside: &dyn IntraNode,
        header: CallHeader,
        call: &CallSpec,
        timeout: Duration,
    ) -> Result<()> {
        let mut own = header.to_slot(call);
        let (n, each) = (self.layout.size(), own.len());
        let mut all = vec![0u8; n * each];
        let whole = all.as_mut_ptr().addr();
        let inputs = vec![Span { addr: own.as_mut_ptr().addr(), bytes: each }].into();
        let outputs = (0..n).map(|rank| Span { addr: whole + rank * each, bytes: each }).collect();
        inside.run_call(
            &Call::inner(CallSpec {
                op: Collective::AllGather,
                inputs,
                outputs,
                ..CallSpec::barrier(None)
            }),
            timeout,
        )?;
        let ranks: Vec<Rank> = (0..n as u32).map(Rank).collect();
        let agreed =
            CallHeader::agree(&all, each, &ranks, &self.layout, self.health.control().name());
        agreed.map(drop).map_err(|error| self.health.fail(error))
    }

    /// Sets up the group's GPUs: blocks until all ranks have called this function or `launch`.
    /// Idempotent.
    pub fn connect(&self, inside: &dyn IntraNode, device: i32, timeout: Duration) -> Result<()> {
        // The default stream, because no program records a graph while it creates a group.
        let target = CudaTarget { device, stream: 0, background: false };
        let cuda = self.cuda("a call")?;
        let mut state = cuda.state();
        self.connected(inside, cuda, &mut state, target, BackendScope::Rail, timeout)
    }

    /// Returns the error for `what`, which works on one node only.
    fn not_served(&self, what: &str) -> Error {
        let nodes: Vec<String> =
            (0..self.layout.num_nodes()).map(|node| self.layout.name_node(node)).collect();
        let (name, nodes) = (self.health.control().name(), nodes.join(", "));
        Error::not_implemented(format!(
            "{what}: group \"{name}\" is on several nodes, {nodes}, between which this is not \
             served; torch_symm.intra_node_group(group) is the \
             part on this one"
        ))
    }

    fn cuda(&self, what: &str) -> Result<&CudaInternode> {
        let nodes = self.layout.num_nodes();
        if nodes > MAX_NODES {
            return Err(self.not_served(&format!(
                "{what} of CUDA tensors on {nodes} nodes, more than {MAX_NODES}"
            )));
        }
        self.cuda.as_ref().ok_or_else(|| {
            let refused = self
                .not_served(&format!("{what} of CUDA tensors, for which no backend was chosen"));
            Error {
                message: format!(
                    "{}; SYMM_INTER_NODE_BACKEND=auto, on all ranks, uses NCCL for them",
                    refused.message
                ),
                ..refused
            }
        })
    }

    /// Rejects a device other than the group's device, and calls after the end of the group.
    fn check_device(&self, cuda: &CudaInternode, state: &CudaState, device: i32) -> Result<()> {
        let control = self.health.control();
        if cuda.closed.load(Ordering::Acquire) {
            return Err(control.destroyed());
        }
        let name = control.name();
        match state.used.as_ref().map(|used| used.device.ordinal()).filter(|&first| first != device)
        {
            None => Ok(()),
            Some(first) => Err(Error::value(format!(
                "group \"{name}\" works on cuda:{first}, this tensor is on cuda:{device}; a group \
                 has one GPU per rank"
            ))),
        }
    }

    /// Rejects a call that must connect GPUs while its stream records a graph.
    fn check_not_recording(&self, target: CudaTarget, first: &str) -> Result<()> {
        if target.stream == 0 || Stream(target.stream).capture()?.is_none() {
            return Ok(());
        }
        let name = self.health.control().name();
        Err(Error::config(format!(
            "group \"{name}\" is on several nodes, and its first {first} connects them, which a \
             CUDA graph cannot record: call one before"
        )))
    }

    fn unconnected(&self, error: Error, others: &str) -> Error {
        let (me, name) = (self.layout.describe(self.rank), self.health.control().name());
        let text = format!(
            "{me} could not connect its GPU with {others} in group \"{name}\": {}",
            error.message
        );
        self.health.fail(Error { message: text, ..error })
    }

    /// Connects this node's GPUs and the backend `needed`, together with all ranks, unless that has
    /// happened.
    fn connected(
        &self,
        inside: &dyn IntraNode,
        cuda: &CudaInternode,
        state: &mut CudaState,
        target: CudaTarget,
        needed: BackendScope,
        timeout: Duration,
    ) -> Result<()> {
        self.check_device(cuda, state, target.device)?;
        if state.connected && (needed == BackendScope::Rail || cuda.connections.has(needed)) {
            return Ok(());
        }
        let again = state.connected;
        self.check_not_recording(
            target,
            if again {
                "gather, scatter or all_to_all of CUDA tensors"
            } else {
                "call on CUDA tensors"
            },
        )?;
        // A rank that passes this barrier knows that all ranks of all nodes are about to create the
        // same backends.
        inside.run_call(&Call::barrier(None), timeout)?;
        self.make(inside, cuda, state, target.device, needed, timeout).map_err(|error| {
            self.unconnected(error, &self.layout.name_others(self.layout.node_of(self.rank)))
        })
    }

    fn make(
        &self,
        inside: &dyn IntraNode,
        cuda: &CudaInternode,
        state: &mut CudaState,
        ordinal: i32,
        needed: BackendScope,
        timeout: Duration,
    ) -> Result<()> {
        let (layout, limit) = (&*self.layout, timeout + BACKEND_TIMEOUT_MARGIN);
        let (node, local) = (layout.node_of(self.rank), layout.local_rank(self.rank));
        self.use_device(cuda, state, ordinal)?;
        if !state.connected {
            if layout.ranks_of(node).len() > 1 {
                inside.gpus(ordinal)?;
            }
            if local < layout.num_rails() {
                let name = self.life.name("symm-cuda-rail", local);
                cuda.connections.make(
                    BackendScope::Rail,
                    &name,
                    &Seat { rank: node, size: layout.num_nodes(), device: ordinal },
                    limit,
                )?;
            }
            state.connected = true;
        }
        if needed == BackendScope::All {
            let name = self.life.name("symm-cuda", "all");
            cuda.connections.make(
                BackendScope::All,
                &name,
                &Seat { rank: self.rank.index(), size: layout.size(), device: ordinal },
                limit,
            )?;
        }
        Ok(())
    }

    /// Opens the device and starts its watchdog, unless that has happened.
    fn use_device(&self, cuda: &CudaInternode, state: &mut CudaState, ordinal: i32) -> Result<()> {
        if state.used.is_some() {
            return Ok(());
        }
        let device = Device::open(ordinal)?;
        let entered = device.enter()?;
        let behind = [Event::new()?, Event::new()?];
        drop(entered);
        let (name, others) =
            (self.health.control().name(), self.layout.name_others(self.layout.node_of(self.rank)));
        let on = self.rail_number().map_or_else(String::new, |rail| format!(" on rail {rail}"));
        cuda.watch.start(WatchdogThread {
            device: Device::open(ordinal)?,
            health: Arc::clone(&self.health),
            connections: Arc::clone(&cuda.connections),
            rail: self.rail_number(),
            who: format!(
                "group \"{name}\": {} waited{on} for {others}",
                self.layout.describe(self.rank)
            ),
        })?;
        state.used = Some(DeviceState { device, last: [None; 2], behind });
        Ok(())
    }

    /// Enqueues the work of `body` after all earlier calls on any stream, and adds it to the
    /// watchdog.
    fn in_order(
        &self,
        cuda: &CudaInternode,
        state: &mut CudaState,
        target: CudaTarget,
        timeout: Duration,
        (call, entries): (Option<(Description, u64)>, Range<u64>),
        body: impl FnOnce(&Device, Stream) -> Result<()>,
    ) -> Result<()> {
        let stream = Stream(target.stream);
        let Some(DeviceState { device, last, behind }) = &mut state.used else {
            return Err(Error::internal("the GPU is not connected"));
        };
        let enqueue = || -> Result<()> {
            let _entered = device.enter()?;
            let capture = stream.capture()?;
            let place = usize::from(capture.is_some());
            let before = last[place].replace(LastEnqueued { stream, capture });
            if before.is_some_and(|before| before.stream != stream && before.capture == capture) {
                stream.wait(&behind[place])?;
            }
            let begin = if capture.is_none() { Some(cuda.watch.mark(stream)?) } else { None };
            body(device, stream)?;
            behind[place].record(stream)?;
            if let Some(begin) = begin {
                cuda.watch.add(EnqueuedCall {
                    begin,
                    end: cuda.watch.mark(stream)?,
                    since: None,
                    timeout,
                    call,
                    entries,
                });
            }
            Ok(())
        };
        let outcome = enqueue();
        // A call that fails half-way leaves other ranks waiting, so it fails the group; a bad
        // argument is rejected before anything is enqueued.
        outcome.map_err(|error| {
            if error.kind == ErrorKind::Value { error } else { self.health.fail(error) }
        })
    }
}

/// Returns true if a call needs the backend of all ranks; the result is the same on all of them.
fn exchanges(op: Collective) -> bool {
    match op {
        Collective::Gather | Collective::Scatter | Collective::AllToAll => true,
        Collective::Barrier
        | Collective::Broadcast
        | Collective::AllReduce
        | Collective::Reduce
        | Collective::AllGather
        | Collective::ReduceScatter => false,
        Collective::AllReduceAddRmsNorm => false,
    }
}
