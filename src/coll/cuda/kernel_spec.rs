//! The kernels that collectives launch.

/// A kernel that collectives launch, with its own program.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelSpec {
    /// The name of the kernel.
    pub symbol: &'static str,
    /// The name of its program's source below `src/kernels/cuda`.
    pub program: &'static str,
    /// True if it is compiled for an element type and an operation.
    pub typed: bool,
    /// True if it has a zero-copy variant.
    pub zero_copy: bool,
}

impl KernelSpec {
    const fn new(program: &'static str, symbol: &'static str) -> Self {
        Self { symbol, program, typed: true, zero_copy: false }
    }

    /// Marks a kernel that moves bytes of any type.
    const fn untyped(self) -> Self {
        Self { typed: false, ..self }
    }

    const fn zero_copy(self) -> Self {
        Self { zero_copy: true, ..self }
    }
}

/// Moves bytes from every rank to every rank.
pub static EXCHANGE: KernelSpec =
    KernelSpec::new("exchange/exchange", "exchange").untyped().zero_copy();
/// As [`EXCHANGE`], for short messages only.
pub static EXCHANGE_LOW_LATENCY: KernelSpec =
    KernelSpec::new("exchange/low_latency", "exchange_low_latency").untyped();
/// Sends and receives.
pub static TRANSFERS: KernelSpec = KernelSpec::new("exchange/send_recv", "transfers").untyped();
/// A broadcast of a long message.
pub static BROADCAST: KernelSpec =
    KernelSpec::new("broadcast/staged", "broadcast_staged").untyped().zero_copy();
/// Any reduction of short messages.
pub static REDUCE_LOW_LATENCY: KernelSpec =
    KernelSpec::new("reduce/low_latency", "reduce_low_latency");
/// Reduce-scatter of long messages.
pub static REDUCE_STAGED: KernelSpec =
    KernelSpec::new("reduce/staged", "reduce_staged").zero_copy();
/// One-shot all-reduce.
pub static ONE_SHOT: KernelSpec = KernelSpec::new("all_reduce/one_shot", "all_reduce_one_shot");
/// Two-shot all-reduce.
pub static TWO_SHOT: KernelSpec = KernelSpec::new("all_reduce/two_shot", "all_reduce_two_shot");
/// All-reduce along the edges of a hybrid cube mesh.
pub static CUBE_MESH: KernelSpec = KernelSpec::new("all_reduce/cube_mesh", "all_reduce_cube_mesh");
/// All-reduce and reduce of long messages.
pub static RSAG_STAGED: KernelSpec =
    KernelSpec::new("all_reduce/rsag_staged", "rsag_staged").zero_copy();
/// One-shot all-reduce of rows, with residual and norm.
pub static NORM_ONE_SHOT: KernelSpec =
    KernelSpec::new("norm/one_shot", "all_reduce_add_rms_norm_one_shot");
/// Residual and norm of rows that have been summed.
pub static NORM_ROWS: KernelSpec = KernelSpec::new("norm/rows", "norm_rows");

/// Synchronization around copies by copy engines.
pub static COPY_SYNC: KernelSpec = KernelSpec::new("copy_engine/sync", "copy_sync").untyped();
/// Sum of the chunks that copy engines have copied here.
pub static COPY_SUM: KernelSpec = KernelSpec::new("copy_engine/sum", "copy_sum");
/// A message that this rank copies to a peer's tensor.
pub static COPY_PUSH: KernelSpec = KernelSpec::new("copy_engine/push", "copy_push").untyped();

/// Synchronization of the two ends of a long message.
pub static MESSAGE_SYNC: KernelSpec =
    KernelSpec::new("copy_engine/message", "message_sync").untyped();

/// Every kernel that collectives launch.
pub static KERNELS: [&KernelSpec; 16] = [
    &EXCHANGE,
    &EXCHANGE_LOW_LATENCY,
    &TRANSFERS,
    &BROADCAST,
    &REDUCE_LOW_LATENCY,
    &REDUCE_STAGED,
    &ONE_SHOT,
    &TWO_SHOT,
    &CUBE_MESH,
    &RSAG_STAGED,
    &NORM_ONE_SHOT,
    &NORM_ROWS,
    &COPY_SYNC,
    &COPY_SUM,
    &COPY_PUSH,
    &MESSAGE_SYNC,
];
