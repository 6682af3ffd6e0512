//! The interface of [`Group`](crate::group::Group) for C++: plain values in, plain values out.
//!
//! Each function translates its arguments and calls the group; it decides nothing. A panic becomes
//! a [`Status`](ffi::Status) and never crosses the language boundary.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

/// The single source of truth for both languages.
// cxx generates items of its own, and the names of fields without a comment explain them.
#[allow(missing_docs)]
#[cxx::bridge(namespace = "symm")]
pub mod ffi {
    /// `error::ErrorKind`, or `None` for success.
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

    /// `op::Collective`.
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

    /// The outcome of a call.
    struct Status {
        kind: ErrorKind,
        message: String,
    }

    /// A contiguous part of a tensor: address and length in bytes.
    #[derive(Clone, Copy)]
    struct Span {
        addr: usize,
        bytes: usize,
    }

    /// The arguments of one collective; `coll::call::CallSpec` defines `inputs` and `outputs`.
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
        /// Number from `call_site_number`; 0 if call sites are not compared.
        call_site: u32,
    }

    /// An input that must be copied before the calls are made: the index of its call among the
    /// calls, and the index of the input within that call.
    #[derive(Clone, Copy)]
    struct Aside {
        call: usize,
        input: usize,
    }

    /// The outcome of calls. If `asides` is not empty, no call was started, because an output would
    /// overwrite these inputs.
    struct Outcome {
        status: Status,
        /// Sequence number of the first call.
        sequence: u64,
        /// The ticket for `wait`.
        ticket: u64,
        asides: Vec<Aside>,
    }

    /// A group to join, and this process's part in it.
    struct JoinSpec {
        group: String,
        rank: i32,
        size: i32,
        /// The members' ranks in the default group; if empty, they equal the ranks in this group.
        global_ranks: Vec<i32>,
        is_default: bool,
        timeout_ms: i64,
        /// A name of `config::InterNodeChoice` or of torch's backends; empty if the group does not
        /// choose.
        inter_node_backend: String,
        /// Names of a `ReduceDtype`, a `SumOrder`, a `CtaPolicy`, and a number of blocks; empty, or
        /// 0, for no choice.
        reduce_dtype: String,
        order: String,
        cta_policy: String,
        max_ctas: i32,
    }

    /// A new group, or null and the error.
    struct JoinResult {
        status: Status,
        group: Box<GroupHandle>,
    }

    /// The arguments of one send or receive; `peer` is -1 for a receive from any source.
    struct MessageSpec {
        peer: i32,
        tag: i32,
        dtype: i32,
        span: Span,
        /// Timeout in milliseconds; negative or 0: the group's timeout.
        timeout_ms: i64,
        send: bool,
    }

    /// `store::request::StoreOp`.
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

    /// A store's answer. `number` holds flags too, `pieces` holds values and keys.
    struct StoreReply {
        status: Status,
        number: i64,
        pieces: Box<Blobs>,
    }

    /// Times of the calls of a load test.
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

    /// A table for human readers.
    struct TextResult {
        status: Status,
        text: String,
    }

    /// A new window, or null and the error.
    struct WindowResult {
        status: Status,
        window: Box<WindowHandle>,
    }

    unsafe extern "C++" {
        include!("symm_bridge.hpp");
        /// A `c10d::Store`.
        type StoreHandle;
        /// Returns the store's answer; never throws. `timeout_ms` applies to `Wait`, the store's
        /// own timeout to all others.
        fn call(
            self: &StoreHandle,
            op: StoreOp,
            keys: &[Blob],
            values: &[Blob],
            amount: i64,
            timeout_ms: i64,
        ) -> StoreReply;
        /// Returns true if the store implements `append`, `multi_get` and `multi_set` itself.
        fn extended(self: &StoreHandle) -> bool;
        /// Returns the store's own timeout; 0 if it has none.
        fn timeout_ms(self: &StoreHandle) -> i64;
        /// Returns the store's name in errors: its class, and the location of its server.
        fn name(self: &StoreHandle) -> String;
        /// Creates the transports of one group.
        type TransportsHandle = crate::bridge::transport::ffi::TransportsHandle;
        /// A handle that reports Python's signals.
        type InterruptHandle;
        /// Returns true if a signal handler has raised an exception on the calling thread, which
        /// only the main thread can see. Never throws; takes the GIL.
        fn is_pending(self: &InterruptHandle) -> bool;
        /// The receiver of the outcome of an asynchronous call; called exactly once, on any thread,
        /// without locks held.
        type Completion;
        /// Returns true if the call copies tensors, which the next two do in its turn. None throws.
        fn copies(self: &Completion) -> bool;
        fn copy_in(self: &Completion);
        fn write_back(self: &Completion);
        /// Returns how many collectives `write_back` runs with `GroupHandle::run_in_turn`.
        fn later_calls(self: &Completion) -> usize;
        /// `source` is the rank that sent a received message, otherwise -1.
        fn complete(self: &Completion, status: &Status, source: i32);
        /// Abandons the windows that start in the `bytes` bytes of device memory at `address`,
        /// which are about to be freed.
        fn forget_windows(address: usize, bytes: usize);
    }

    extern "Rust" {
        /// Values or keys of a store's answer; both languages create them.
        type Blobs;
        fn no_blobs() -> Box<Blobs>;
        fn add(self: &mut Blobs, piece: &[u8]);
        fn count(self: &Blobs) -> usize;
        fn get(self: &Blobs, index: usize) -> &[u8];
        /// Makes waiting calls query `handle` every 100 ms from now on.
        fn watch_interrupts(handle: UniquePtr<InterruptHandle>);
        /// Clients of one store, for `store::load_generator`.
        type LoadGenerator;
        fn load_generator() -> Box<LoadGenerator>;
        fn add_client(self: &mut LoadGenerator, store: UniquePtr<StoreHandle>);
        /// `work` is a name of `store::load_generator::Workload`.
        fn run_load(self: &LoadGenerator, work: &str, calls: u32) -> LoadResult;
        /// Returns the link matrix of the GPUs with these UUIDs, in this order.
        fn nvlink_matrix(uuids: &[String]) -> LinkMatrix;
        /// Returns a report of all GPUs of this node.
        fn topology_report() -> TextResult;
        type GroupHandle;
        /// Checks the choices of `spec`, except `inter_node_backend`.
        fn check_choices(spec: &JoinSpec) -> Status;
        /// Joins a group through `store`, also on other nodes. On failure `status` is the error,
        /// and `group` cannot be used.
        fn join(
            store: UniquePtr<StoreHandle>,
            transports: SharedPtr<TransportsHandle>,
            spec: &JoinSpec,
        ) -> JoinResult;
        /// Runs `calls` in order, on this thread if the group is idle, and returns when they have
        /// ended. A failed call fails the group. `profiled`: the flight recorder notes for which
        /// ranks this rank waits.
        fn run(self: &GroupHandle, calls: &[CallSpec], timeout_ms: i64, profiled: bool) -> Outcome;
        /// Queues `calls`. `done` is called only if the outcome has status 0 and no `asides`.
        fn submit(
            self: &GroupHandle,
            calls: &[CallSpec],
            timeout_ms: i64,
            profiled: bool,
            done: UniquePtr<Completion>,
        ) -> Outcome;
        /// Runs `calls` in the turn of the call whose `Completion::write_back` calls this function.
        fn run_in_turn(self: &GroupHandle, calls: &[CallSpec], timeout_ms: i64) -> Outcome;
        /// Checks `calls` of a coalesced block; `launch` gets them at the end of the block.
        fn examine(self: &GroupHandle, calls: &[CallSpec]) -> Outcome;
        /// Starts a send; the returned ticket is for `wait`.
        fn send(self: &GroupHandle, transfer: &MessageSpec, done: UniquePtr<Completion>) -> u64;
        /// Starts a receive; the returned ticket is for `wait`.
        fn recv(self: &GroupHandle, transfer: &MessageSpec, done: UniquePtr<Completion>) -> u64;
        /// Blocks until the completion of `ticket` has been called, and advances calls meanwhile.
        /// Returns kind 9 if `timeout_ms` passes first.
        fn wait(self: &GroupHandle, ticket: u64, timeout_ms: i64) -> Status;
        /// Advances pending messages without blocking.
        fn progress(self: &GroupHandle);
        /// Enqueues `calls` on a CUDA stream; only the first launch waits for the peers.
        /// `background`: `stream` is one of the group's own streams.
        fn launch(
            self: &GroupHandle,
            calls: &[CallSpec],
            device: i32,
            stream: usize,
            background: bool,
            timeout_ms: i64,
        ) -> Status;
        /// Enqueues sends and receives as one launch.
        fn launch_transfers(
            self: &GroupHandle,
            transfers: &[MessageSpec],
            device: i32,
            stream: usize,
            background: bool,
            timeout_ms: i64,
        ) -> Status;
        /// Sets up the group's memory on CUDA device `device`; blocks until all ranks have called
        /// this function or `launch`. Idempotent.
        fn connect(self: &GroupHandle, device: i32) -> Status;
        /// Runs a barrier: returns once every rank has called this function. On rank 0, the error
        /// of a timeout lists the missing ranks.
        fn monitored_barrier(
            self: &GroupHandle,
            timeout_ms: i64,
            wait_all_ranks: bool,
            call_site: u32,
        ) -> Status;
        /// Collective: makes a window on each rank's memory. On the host, `device` is negative.
        fn rendezvous(
            self: &GroupHandle,
            device: i32,
            address: usize,
            pad_bytes: usize,
            timeout_ms: i64,
        ) -> WindowResult;
        /// Returns once all ranks have called it; fails on all ranks if their texts differ.
        fn compare_operators(self: &GroupHandle, call: &str) -> Status;
        /// Reports to the waiting ranks that this rank rejected a collective because of `text`.
        fn reject(self: &GroupHandle, text: &str);
        /// Reports, as `reject` does, a rejected operator on symmetric memory of the host.
        fn reject_operator(self: &GroupHandle, text: &str);
        /// Reports, as `reject` does, a rejected send or receive; its span is ignored.
        fn reject_message(self: &GroupHandle, transfer: &MessageSpec, text: &str);
        /// Fails the group on every rank; blocked calls return at once.
        fn abort(self: &GroupHandle);
        /// Leaves the group after pending calls, at the latest after the timeout; idempotent.
        fn shutdown(self: &GroupHandle);
        /// As `shutdown`, but within `limit_ms`, after which pending calls fail. `farewell`: the
        /// error that makes this rank leave, or empty.
        fn leave(self: &GroupHandle, limit_ms: i64, farewell: &str);
        /// Returns the number of collectives that have started, which is the same on all ranks.
        fn sequence(self: &GroupHandle) -> u64;
        /// Sets the timeout of calls that have no timeout of their own.
        fn set_timeout(self: &GroupHandle, timeout_ms: i64);
        /// Returns the index of the CUDA device on which the group is set up; -1 if there is none.
        fn device(self: &GroupHandle) -> i32;
        fn timeout(self: &GroupHandle) -> i64;
        /// Returns the first failure; kind 0 if the group has not failed.
        fn error(self: &GroupHandle) -> Status;
        /// Returns the first failure of a call; kind 0 if no call has failed. A death counts once a
        /// call has raised it.
        fn failure(self: &GroupHandle) -> Status;
        /// Allocates `bytes` of zeroed symmetric memory of a CUDA device, or of the host if
        /// `device` is negative; `free_window` frees it.
        fn allocate_window(device: i32, bytes: usize, address: &mut usize) -> Status;
        fn free_window(address: usize) -> Status;
        /// `is_symmetric`: true if `address` is in this process's symmetric memory. `is_writable`:
        /// true if this host memory may be written.
        fn is_symmetric(address: usize) -> bool;
        fn is_writable(address: usize, bytes: usize) -> bool;
        type WindowHandle;
        /// Returns the addresses of the ranks' buffers in this process.
        fn buffers(self: &WindowHandle) -> Vec<usize>;
        /// Returns the addresses of the ranks' signal pads in this process.
        fn pads(self: &WindowHandle) -> Vec<usize>;
        /// Returns the addresses of three arrays with the values of `buffers()`, `pads()` and
        /// `global_ranks()`. They are in the device's memory, or in host memory for a CPU window.
        fn tables(self: &WindowHandle) -> [usize; 3];
        /// Returns the members' ranks in the default group.
        fn global_ranks(self: &WindowHandle) -> Vec<i32>;
        /// Returns the bytes of each rank's buffer.
        fn bytes(self: &WindowHandle) -> usize;
        /// Returns true if this rank still owns the memory that the window was made of.
        fn is_current(self: &WindowHandle) -> bool;
        /// Fails in a forked child.
        fn check_process(self: &WindowHandle) -> Status;
        /// Keeps the memory until the group ends, because a graph that is being recorded uses it.
        fn record(self: &WindowHandle);
        /// Returns, or lets `stream` continue, once all ranks have called it on this channel. If a
        /// barrier on a stream times out, the error of a later call names the late ranks.
        fn barrier(self: &WindowHandle, channel: i32, timeout_ms: i64, stream: usize) -> Status;
        /// Sets this rank's word of `channel` in the pad of `peer`, once it is clear.
        fn put_signal(
            self: &WindowHandle,
            peer: i32,
            channel: i32,
            timeout_ms: i64,
            stream: usize,
        ) -> Status;
        /// Waits until `peer` has set its word on `channel` in this rank's pad, then clears the
        /// word.
        fn wait_signal(
            self: &WindowHandle,
            peer: i32,
            channel: i32,
            timeout_ms: i64,
            stream: usize,
        ) -> Status;
        /// Sums the inputs. Collective on the host, as are all functions up to `all_to_all_vdev`.
        /// `local` is first copied to the start of this rank's input.
        fn one_shot_all_reduce(
            self: &WindowHandle,
            dtype: i32,
            input: Span,
            local: Span,
            out: Span,
        ) -> Status;
        /// Sums the inputs; each rank computes a part. `out` may be the input.
        fn two_shot_all_reduce(self: &WindowHandle, dtype: i32, input: Span, out: Span) -> Status;
        /// Reduces the inputs; each rank gets its part of each row of `row` bytes.
        fn reduce_scatter(
            self: &WindowHandle,
            dtype: i32,
            reduce_op: u8,
            input: Span,
            row: usize,
            out: Span,
        ) -> Status;
        /// Concatenates the inputs of all ranks.
        fn all_gather(self: &WindowHandle, dtype: i32, input: Span, out: Span) -> Status;
        /// Sends rows to all ranks. `spans` are input, splits, output and layout; `rows` are the
        /// numbers of rows of the input and of the output, and the size of a row.
        fn all_to_all_vdev(
            self: &WindowHandle,
            splits: &WindowHandle,
            dtype: i32,
            spans: [Span; 4],
            rows: [usize; 3],
        ) -> Status;
        /// Stores `value` to the word at `address` with release ordering.
        fn store_release(address: usize, value: u32) -> Status;
        /// Sets the directories that may have the compiler of CUDA kernels, best first.
        fn cuda_libraries(folders: &CxxVector<CxxString>);
        /// Returns kind 0 if `reduce_op` (torch code) is defined for `dtype` (torch code).
        fn check_reduce(dtype: i32, reduce_op: u8) -> Status;
        /// Returns the number of the capture that records the CUDA stream, or 0. Never blocks.
        fn capture_of(stream: usize) -> u64;
        /// True if `Work.wait()` of a CUDA call blocks the host: `SYMM_BLOCKING_WAIT`.
        fn blocking_wait() -> bool;
        /// True if calls carry their call sites: `SYMM_DEBUG=call_site`.
        fn call_sites_wanted() -> bool;
        /// Returns the number of a line of the user's program, "train.py:12".
        fn call_site_number(text: &str) -> u32;
        /// Returns CUDA calls by algorithm, and bytes between nodes, as JSON.
        fn stats() -> String;
        /// Returns the seconds between the tables of `SYMM_STATS_INTERVAL`; 0 if they are off.
        fn stats_seconds() -> u64;
        /// Returns the last calls of this process as JSON.
        fn trace_text() -> TextResult;
        /// Writes `content` to `path` (raw bytes), or if `path` is empty, to the file `name` in the
        /// directory of dumps; returns the file's path.
        fn write_trace(path: &[u8], name: &str, content: &[u8]) -> TextResult;
        /// Returns true if CUDA device `device` supports memory that its peers access directly.
        fn supports_symm_mem(device: i32) -> bool;
        /// Returns an id of this process's node as text, the same for all ranks of a node.
        fn node_id() -> String;
        /// Sets the thresholds in bytes of multi-node groups whose rank 0 is this process;
        /// `chunk_bytes` 0 restores the thresholds of the profile.
        fn set_trial_thresholds(
            multi_rail_bytes: usize,
            chunk_bytes: usize,
            gather_bytes: usize,
        ) -> Status;
        /// Logs a line from Python at INFO.
        fn inform(text: &str);
        /// While `on`, keeps log lines that pass `filter` (empty: `SYMM_LOG`) for `log_lines`
        /// instead of writing them to stderr.
        fn log_to_queue(filter: &str, on: bool);
        /// Returns the kept lines as JSON: level, module, text, seconds since 1970. Waits up to
        /// `limit_ms` for the first line while lines are kept.
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

use cuda::{blocking_wait, capture_of, stats, stats_seconds};
use group::{GroupHandle, check_choices, join};
use internode::{node_id, set_trial_thresholds};
use kernels::{check_reduce, cuda_libraries};
use load::{LoadGenerator, load_generator};
use log::{inform, log_lines, log_to_queue, version};
use memory::{is_symmetric, is_writable, supports_symm_mem};
use native_store::{Blobs, no_blobs, watch_interrupts};
use outcome::{from_cpp, from_cpp_in_turn, guarded, milliseconds, started};
use topology::{nvlink_matrix, topology_report};
use trace::{call_site_number, call_sites_wanted, trace_text, write_trace};
use window::{WindowHandle, allocate_window, free_window, store_release};
