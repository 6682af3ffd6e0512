//! The C++ side's view of [`Group`](crate::group::Group): plain values in, plain values out.
//!
//! Each shim translates and calls; none decides. A panic becomes a [`Status`](ffi::Status), never crosses the boundary.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

/// The single source of truth for both languages.
#[allow(missing_docs)] // cxx generates items of its own, and fields without a note say what they are.
#[cxx::bridge(namespace = "symm")]
pub mod ffi {
    /// `error::ErrorKind`, or `None` of a success.
    #[repr(u8)]
    enum ErrorKind {
        None = 0,
        Peer = 1,
        Timeout = 2,
        Mismatch = 3,
        Config = 4,
        Aborted = 5,
        Value = 6,
        Type = 7,
        NotImplemented = 8,
        WaitTimeout = 9,
        Internal = 10,
        Network = 11,
        QueueEmpty = 12,
    }

    /// `op::Op`.
    #[repr(u8)]
    enum Collective {
        Barrier = 0,
        Broadcast = 1,
        AllReduce = 2,
        Reduce = 3,
        AllGather = 4,
        Gather = 5,
        Scatter = 6,
        ReduceScatter = 7,
        AllToAll = 8,
        AllReduceAddRmsNorm = 9,
    }

    /// Outcome of a call.
    struct Status {
        kind: ErrorKind,
        message: String,
    }

    /// A contiguous piece of a tensor: address and length in bytes.
    #[derive(Clone, Copy)]
    struct Span {
        addr: usize,
        bytes: usize,
    }

    /// Arguments of one collective; `coll::call::CallSpec` has the meaning of `inputs` and `outputs`.
    struct CallSpec<'a> {
        op: Collective,
        /// `c10::ScalarType`.
        dtype: i32,
        /// `c10d::ReduceOp::RedOpType`.
        reduce_op: u8,
        root: i32,
        factor: f64,
        inputs: &'a [Span],
        outputs: &'a [Span],
        /// Number from `call_site_number`; 0: call sites are not compared.
        call_site: u32,
    }

    /// An input, by the number of its call, that must be copied before the calls are made.
    #[derive(Clone, Copy)]
    struct Aside {
        call: usize,
        input: usize,
    }

    /// The outcome of calls. If `asides` is not empty, no call was started, because an output would overwrite these inputs.
    struct Outcome {
        status: Status,
        /// Number of the first call in the group.
        sequence: u64,
        /// For `wait`.
        ticket: u64,
        asides: Vec<Aside>,
    }

    /// Group to join, and this process's part in it.
    struct JoinSpec {
        group: String,
        rank: i32,
        size: i32,
        /// Ranks of the members in the default group; empty: the same as in this group.
        global_ranks: Vec<i32>,
        is_default: bool,
        timeout_ms: i64,
        /// What connects nodes: a name of `config::InterNodeChoice` or of backends, or empty where the group does not choose.
        inter_node_backend: String,
        /// Type of sums between nodes: a name of `internode::partials::ReduceDtype`, or empty where the group does not choose.
        reduce_dtype: String,
        /// Order of sums over ranks: a name of `dtype::SumOrder`, or empty where the group does not choose.
        order: String,
    }

    /// A new group, or null and why not.
    struct JoinResult {
        status: Status,
        group: Box<GroupHandle>,
    }

    /// Arguments of one message, which is sent (`send`) or received; from any rank where `peer` is -1.
    struct MessageSpec {
        peer: i32,
        tag: i32,
        dtype: i32,
        span: Span,
        /// Timeout in milliseconds; negative or 0: the group's timeout.
        timeout_ms: i64,
        send: bool,
    }

    /// `store::request::Op`.
    #[repr(u8)]
    enum StoreOp {
        Set = 1,
        CompareSet = 2,
        Get = 3,
        Add = 4,
        Check = 5,
        Wait = 6,
        Delete = 7,
        NumKeys = 8,
        Append = 9,
        MultiGet = 10,
        MultiSet = 11,
        Push = 12,
        Pop = 13,
        TryPop = 14,
        QueueLen = 15,
        ListKeys = 16,
    }

    /// A key (UTF-8) or a value.
    struct Blob<'a> {
        data: &'a [u8],
    }

    /// Answer of a store. `number` holds flags too, `pieces` values and keys.
    struct StoreReply {
        status: Status,
        number: i64,
        pieces: Box<Blobs>,
    }

    /// A TCP store; the meaning of the fields stands at `store::tcp::TcpOptions`.
    struct TcpSpec {
        host: String,
        port: u16,
        /// Number of workers; negative: not known.
        world_size: i64,
        is_master: bool,
        timeout_ms: i64,
        wait_for_workers: bool,
        multi_tenant: bool,
        /// Descriptor that the server listens at; negative: none.
        listen_fd: i32,
        /// Secret that clients must know; empty: none.
        secret: Vec<u8>,
        require_same_user: bool,
    }

    /// A new store, or why not. Host and port of a TCP store are those it is reached at.
    struct StoreResult {
        status: Status,
        store: Box<NativeStore>,
        host: String,
        port: u16,
    }

    /// Times of the calls of a load.
    struct LoadResult {
        status: Status,
        seconds: f64,
        nanoseconds: Vec<u64>,
    }

    /// NVLink counts between GPUs, row by row.
    struct LinkMatrix {
        status: Status,
        links: Vec<u32>,
    }

    /// A table for people to read.
    struct TextResult {
        status: Status,
        text: String,
    }

    /// A mesh whose collectives are to be priced; the meaning of the fields stands at `coll::cost::Mesh`.
    struct CostMesh {
        device: String,
        ranks: Vec<usize>,
        job: usize,
        per_node: usize,
    }

    /// The result of opening a cost model: its prices, or the error. `found` is false if no profile fits this hardware.
    struct CostModelResult {
        status: Status,
        found: bool,
        model: Box<CostModel>,
    }

    /// Price of one collective, and its reason.
    struct Price {
        status: Status,
        us: f64,
        algorithm: String,
        basis: String,
    }

    /// `coll::cost::profile::Local`; nothing costs anything where it was not measured.
    struct LocalCost {
        known: bool,
        step_us: f64,
        slice_us: f64,
        copy_gb_per_s: f64,
    }

    /// A new window, or null and why not.
    struct WindowResult {
        status: Status,
        window: Box<WindowHandle>,
    }

    unsafe extern "C++" {
        include!("symm_bridge.hpp");
        /// A `c10d::Store`.
        type StoreHandle;
        /// Answer of the store; never throws. `timeout_ms` is for `Wait`: c10d bounds all else by the store's own.
        fn call(self: &StoreHandle, op: StoreOp, keys: &[Blob], values: &[Blob], amount: i64, timeout_ms: i64) -> StoreReply;
        /// Whether it has `append`, `multi_get` and `multi_set` of its own.
        fn extended(self: &StoreHandle) -> bool;
        /// The store's own timeout; 0: none.
        fn timeout_ms(self: &StoreHandle) -> i64;
        /// Name of the store in errors: its class, and where its server is.
        fn name(self: &StoreHandle) -> String;
        /// Creates the transports of one group.
        type TransportsHandle = crate::bridge::transport::ffi::TransportsHandle;
        /// Handle of Python's signals.
        type InterruptHandle;
        /// Whether the calling thread, the first, is to stop because of one, and has the exception now. Never throws; takes the GIL.
        fn is_pending(self: &InterruptHandle) -> bool;
        /// Receiver of the outcome of an asynchronous call; called exactly once, on any thread, without locks held.
        type Completion;
        /// `source` is the rank a receive got its message from, else -1.
        fn complete(self: &Completion, status: &Status, source: i32);
        /// Abandons the windows that start in `bytes` at `address`, memory of a device that is about to be freed.
        fn forget_windows(address: usize, bytes: usize);
    }

    extern "Rust" {
        /// Values or keys that a store answers with; both sides may make one.
        type Blobs;
        fn no_blobs() -> Box<Blobs>;
        fn add(self: &mut Blobs, piece: &[u8]);
        fn count(self: &Blobs) -> usize;
        fn get(self: &Blobs, index: usize) -> &[u8];
        /// A store of `symm::store`, or the error.
        type NativeStore;
        fn store_memory() -> Box<NativeStore>;
        /// `path` is the system's bytes.
        fn store_file(path: &[u8], world_size: i64, timeout_ms: i64) -> StoreResult;
        fn store_tcp(spec: &TcpSpec) -> StoreResult;
        /// `store` as the core sees it.
        fn wrap_store(store: UniquePtr<StoreHandle>) -> Box<NativeStore>;
        /// Makes calls that wait ask `handle` every 100 ms from now on.
        fn watch_interrupts(handle: UniquePtr<InterruptHandle>);
        fn share(self: &NativeStore) -> Box<NativeStore>;
        /// `timeout_ms` bounds the waiting; 0 is the longest limit there is, negative an error.
        fn call(self: &NativeStore, op: StoreOp, keys: &[Blob], values: &[Blob], amount: i64, timeout_ms: i64) -> StoreReply;
        /// Returns once all `size` ranks have called it with this key.
        fn barrier(self: &NativeStore, key: &[u8], rank: i64, size: i64, timeout_ms: i64) -> Status;
        /// A meeting under `prefix`: says `word` about `what` and answers what every rank says; if `what` is empty, assembles all ranks.
        fn meet(self: &NativeStore, prefix: &[u8], what: &[u8], word: &[u8], rank: i64, size: i64, timeout_ms: i64) -> StoreReply;
        /// Clients of one store, for `store::load`.
        type LoadGenerator;
        fn load_generator() -> Box<LoadGenerator>;
        fn add_client(self: &mut LoadGenerator, store: UniquePtr<StoreHandle>);
        /// `work` is a name of `store::load::Work`.
        fn run_load(self: &LoadGenerator, work: &str, calls: u32) -> LoadResult;
        /// Link matrix of the GPUs with these UUIDs, in this order.
        fn nvlink_matrix(uuids: &[String]) -> LinkMatrix;
        /// Report of all GPUs of this node.
        fn topology_report() -> TextResult;
        /// `coll::cost::Model`.
        type CostModel;
        /// `basis`: `"torch"`, `"links"` or `"measured"`. `gb_per_s` and `us` (of each link), `profile`: empty for the model's own.
        fn cost_model(mesh: &CostMesh, basis: &str, gb_per_s: &[f64], us: &[f64], profile: &[u8]) -> CostModelResult;
        /// Price of the collective `op` on `bytes` along dimension `dim`.
        fn price(self: &CostModel, op: &str, bytes: f64, dim: usize) -> Price;
        /// Times of a redistribution's steps beside their collectives.
        fn local(self: &CostModel) -> LocalCost;
        /// Rate in GB/s of each dimension's link.
        fn gb_per_s(self: &CostModel) -> Vec<f64>;
        /// Microseconds of a trip over each dimension's link.
        fn trip_us(self: &CostModel) -> Vec<f64>;
        /// Reference time of the profile; 0: none.
        fn reference_us(self: &CostModel) -> f64;
        /// Origin of prices, for people.
        fn origin(self: &CostModel) -> String;
        /// JSON: the hardware that a profile of a job of `ranks` is keyed by, and the name of its file; `null` if it cannot be told.
        fn profile_key(device: &str, ranks: usize) -> TextResult;
        /// Tells in which folder the package keeps its profiles; the system's bytes.
        fn set_bundled_profile_dir(folder: &[u8]);
        /// Folder of the user's profiles; empty: none.
        fn user_profile_dir() -> Vec<u8>;
        type GroupHandle;
        /// Joins a group through `store`, and the others where it is on several nodes. On failure `status` says why and `group` is dead.
        fn join(store: UniquePtr<StoreHandle>, transports: SharedPtr<TransportsHandle>, spec: &JoinSpec) -> JoinResult;
        /// Runs `calls` in order and returns when they are done: inline if the group is idle. One failed call fails the group. `profiled`:
        /// the flight recorder notes which ranks this one waits for.
        fn run(self: &GroupHandle, calls: &[CallSpec], timeout_ms: i64, profiled: bool) -> Outcome;
        /// Queues `calls` behind everything submitted before. `done` is called only if the status is 0 and there are no asides.
        fn submit(self: &GroupHandle, calls: &[CallSpec], timeout_ms: i64, profiled: bool, done: UniquePtr<Completion>) -> Outcome;
        /// Checks `calls`, which `launch` gets later, and begins none: calls of a coalesced block are launched at its end.
        fn examine(self: &GroupHandle, calls: &[CallSpec]) -> Outcome;
        /// Starts a send; the returned ticket is for `wait`.
        fn send(self: &GroupHandle, transfer: &MessageSpec, done: UniquePtr<Completion>) -> u64;
        /// Starts a receive; the returned ticket is for `wait`.
        fn recv(self: &GroupHandle, transfer: &MessageSpec, done: UniquePtr<Completion>) -> u64;
        /// Blocks until the ticket's completion has been called, helping it along. The status is the waiting's: kind 9 after `timeout_ms`.
        fn wait(self: &GroupHandle, ticket: u64, timeout_ms: i64) -> Status;
        /// Helps outstanding transfers along without blocking.
        fn progress(self: &GroupHandle);
        /// Enqueues `calls` in order on a CUDA stream; only the first launch waits, for the peers. `background`: the group's own stream.
        fn launch(self: &GroupHandle, calls: &[CallSpec], device: i32, stream: usize, background: bool, timeout_ms: i64) -> Status;
        /// Enqueues sends and receives as one.
        fn launch_transfers(
            self: &GroupHandle,
            transfers: &[MessageSpec],
            device: i32,
            stream: usize,
            background: bool,
            timeout_ms: i64,
        ) -> Status;
        /// Sets up the group's memory on CUDA device `device`: blocks until all ranks have called it or launched; idempotent.
        fn connect(self: &GroupHandle, device: i32) -> Status;
        /// Waits until every rank called it: like a barrier, but at the timeout the root's error lists the missing ranks.
        fn monitored_barrier(self: &GroupHandle, timeout_ms: i64, wait_all_ranks: bool, call_site: u32) -> Status;
        /// Collective: what every rank has at an `address`, as this one reaches it. `device` negative: the host. After a failure `window` is dead.
        fn rendezvous(self: &GroupHandle, device: i32, address: usize, pad_bytes: usize, timeout_ms: i64) -> WindowResult;
        /// Reports to the ranks that wait for it that this rank rejected a collective because of `text`.
        fn reject(self: &GroupHandle, text: &str);
        /// Refuses, as `reject` does, an operator on symmetric memory of the host.
        fn reject_operator(self: &GroupHandle, text: &str);
        /// Refuses a send or receive, as `reject` does for a collective; its span counts for nothing.
        fn reject_message(self: &GroupHandle, transfer: &MessageSpec, text: &str);
        /// Fails the group on every rank; blocked calls return at once.
        fn abort(self: &GroupHandle);
        /// Leaves the group after outstanding calls, at most the timeout; idempotent.
        fn shutdown(self: &GroupHandle);
        /// Leaves with a limit of its own, after which outstanding calls fail; because of the error `farewell`, if that is not empty.
        fn leave(self: &GroupHandle, limit_ms: i64, farewell: &str);
        /// Number of collectives begun so far; the same on all ranks.
        fn sequence(self: &GroupHandle) -> u64;
        /// The timeout of calls that bring none.
        fn set_timeout(self: &GroupHandle, timeout_ms: i64);
        /// Index of the CUDA device on which the group is set up; -1: on none.
        fn device(self: &GroupHandle) -> i32;
        fn timeout(self: &GroupHandle) -> i64;
        /// Returns the first failure; kind 0 while the group lives.
        fn error(self: &GroupHandle) -> Status;
        /// Returns the first failure of a call; kind 0 until one has failed. A member's death counts once a call has run into it.
        fn failure(self: &GroupHandle) -> Status;
        /// Finds `address` for `bytes` of zeroed symmetric memory of a CUDA device, of the host if `device` is negative; frees it.
        fn allocate_window(device: i32, bytes: usize, address: &mut usize) -> Status;
        fn free_window(address: usize) -> Status;
        /// Whether `address` is one of this process's symmetric memory; whether memory of the host may be written.
        fn is_symmetric(address: usize) -> bool;
        fn is_writable(address: usize, bytes: usize) -> bool;
        type WindowHandle;
        /// Addresses in this process of the ranks' buffers.
        fn buffers(self: &WindowHandle) -> Vec<usize>;
        /// Addresses in this process of the ranks' signal pads.
        fn pads(self: &WindowHandle) -> Vec<usize>;
        /// Addresses at which the device finds `buffers()`, `pads()` and `global_ranks()` as arrays; on the host, too.
        fn tables(self: &WindowHandle) -> [usize; 3];
        /// Ranks of the members in the default group.
        fn global_ranks(self: &WindowHandle) -> Vec<i32>;
        /// Bytes of each rank's buffer.
        fn bytes(self: &WindowHandle) -> usize;
        /// Whether the memory that it was made of is still this rank's.
        fn is_current(self: &WindowHandle) -> bool;
        /// Refuses to be used in a forked child.
        fn check_process(self: &WindowHandle) -> Status;
        /// A graph that is being recorded uses it: its memory stays until the group goes.
        fn record(self: &WindowHandle);
        /// Returns once all ranks have called it on this channel; on a GPU `stream` goes on then. A later call names who was late.
        fn barrier(self: &WindowHandle, channel: i32, timeout_ms: i64, stream: usize) -> Status;
        /// Sets this rank's word of `channel` in the pad of `peer`, once it is clear.
        fn put_signal(self: &WindowHandle, peer: i32, channel: i32, timeout_ms: i64, stream: usize) -> Status;
        /// Waits until `peer` has set its word on `channel` in this rank's pad, then clears the word.
        fn wait_signal(self: &WindowHandle, peer: i32, channel: i32, timeout_ms: i64, stream: usize) -> Status;
        /// Collective on the host, like the next ones: adds the inputs, tensors in the window; `local` is first copied to the start of this rank's.
        fn one_shot_all_reduce(self: &WindowHandle, dtype: i32, input: Span, local: Span, out: Span) -> Status;
        /// Adds the inputs; each rank adds a part of them. `out` may be the input.
        fn two_shot_all_reduce(self: &WindowHandle, dtype: i32, input: Span, out: Span) -> Status;
        /// Reduces the inputs; each rank gets its piece of each row of `row` bytes.
        fn reduce_scatter(self: &WindowHandle, dtype: i32, reduce_op: u8, input: Span, row: usize, out: Span) -> Status;
        /// Puts the inputs of all ranks one behind the other.
        fn all_gather(self: &WindowHandle, input: Span, out: Span) -> Status;
        /// Sends rows; `spans`: input, splits, output, layout; `rows`: of input and output. `window::operators::exchanges` says more.
        fn all_to_all_vdev(self: &WindowHandle, splits: &WindowHandle, spans: [Span; 4], rows: [usize; 2]) -> Status;
        /// Stores `value` to the word at `address`; who sees it there sees what this thread wrote before.
        fn store_release(address: usize, value: u32) -> Status;
        /// Folders in which the CUDA kernels' compiler may be, best first; the system's bytes.
        fn cuda_libraries(folders: &CxxVector<CxxString>);
        /// Returns kind 0 if `reduce_op` (torch code) means something for `dtype` (torch code).
        fn check_reduce(dtype: i32, reduce_op: u8) -> Status;
        /// Number of the capture that records what is enqueued in the CUDA stream; 0: none does. May be asked from any thread.
        fn capture_of(stream: usize) -> u64;
        /// Whether `Work.wait()` of a CUDA call blocks the host: `SYMM_BLOCKING_WAIT`.
        fn blocking_wait() -> bool;
        /// Whether calls are to bring their call sites: `SYMM_DEBUG=call_site`.
        fn call_sites_wanted() -> bool;
        /// The number of a line of the user's program, "train.py:12".
        fn call_site_number(text: &str) -> u32;
        /// Statistics as JSON: which algorithm has served how many CUDA calls of this process, and what went between nodes.
        fn stats() -> String;
        /// Seconds between two tables of `SYMM_STATS_INTERVAL`; 0: none.
        fn stats_seconds() -> u64;
        /// Journal as JSON: the last calls of this process.
        fn trace_text() -> TextResult;
        /// Writes `content` to `path` (the system's bytes), or as `name` where dumps are kept if that is empty; answers the file's path.
        fn write_trace(path: &[u8], name: &str, content: &[u8]) -> TextResult;
        /// Whether CUDA device `device` can have memory that its peers load and store directly.
        fn supports_symm_mem(device: i32) -> bool;
        /// Identity of this process's host as text: equal where ranks share one.
        fn node_id() -> String;
        /// Sets the thresholds, in bytes, of groups on several nodes whose first rank is this process; `chunk_bytes` 0: the profile's.
        fn set_trial_thresholds(multi_rail_bytes: usize, chunk_bytes: usize, gather_bytes: usize) -> Status;
        /// Logs a line of Python's at INFO.
        fn inform(text: &str);
        /// Keeps the log's lines that `filter` passes (empty: `SYMM_LOG`) for `log_lines`, in place of standard error; not `on`: no longer.
        fn log_to_queue(filter: &str, on: bool);
        /// Takes the lines that are kept, as JSON: level, module, text, seconds since 1970. Waits for the first while lines are kept.
        fn log_lines(limit_ms: u64) -> String;
        fn version() -> String;
    }
}

mod cost;
mod cuda;
mod fused;
mod group;
mod internode;
mod kernels;
mod load;
mod log;
mod memory;
mod native_store;
mod outcome;
mod topology;
mod torch_store;
mod trace;
mod transport;
mod window;

use cost::{CostModel, cost_model, profile_key, set_bundled_profile_dir, user_profile_dir};
use cuda::{blocking_wait, capture_of, stats, stats_seconds};
use group::{GroupHandle, join};
use internode::{node_id, set_trial_thresholds};
use kernels::{check_reduce, cuda_libraries};
use load::{LoadGenerator, load_generator};
use log::{inform, log_lines, log_to_queue, version};
use memory::{is_symmetric, is_writable, supports_symm_mem};
use native_store::{Blobs, NativeStore, no_blobs, store_file, store_memory, store_tcp, watch_interrupts, wrap_store};
use outcome::{from_cpp, guarded, milliseconds, started};
use topology::{nvlink_matrix, topology_report};
use trace::{call_site_number, call_sites_wanted, trace_text, write_trace};
use window::{WindowHandle, allocate_window, free_window, store_release};
