//! Arguments of the kernels, laid out as `src/kernels/cuda/**` declares them.
#![allow(unsafe_code, reason = "the bytes of a kernel's arguments")]

use super::workspace::layout::{Channel, MAX_RANKS};

/// A pointer or a number for each rank.
pub type PerRank = [u64; MAX_RANKS];

/// `Common` in `wait.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CommonArgs {
    /// Memory of this channel on every rank, as mapped in this process.
    pub peer: PerRank,
    /// Address of a word of host memory that is not 0 once the group has failed.
    pub stop: u64,
    /// Address of a `Report` in host memory.
    pub report: u64,
    /// Timeout of a waiting thread in nanoseconds.
    pub timeout: u64,
    /// The call's number.
    pub call: u64,
}

/// `LowLatency` in `low_latency.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LowLatencyArgs {
    /// Offset of the blocks' epochs in the channel.
    pub epochs: u64,
    /// Offset of the LL lines in the channel.
    pub lines: u64,
    /// Number of units of one message that one block carries.
    pub units: u32,
}

/// `Sentinel` in `sentinel.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SentinelArgs {
    /// Offset of the blocks' epochs in the channel.
    pub epochs: u64,
    /// Offset of the sentinel slots in the channel.
    pub slots: u64,
    /// Number of units that one source has in one stage of one block.
    pub units: u32,
}

/// `Staging` in `staging.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StagingArgs {
    /// Offset of the lanes' words in the channel.
    pub words: u64,
    /// Offset of the staging slots in the channel.
    pub slots: u64,
    /// Distance between slots in bytes.
    pub slot_bytes: u32,
    /// Size of a chunk in this call; exchanges do not use it.
    pub chunk_bytes: u32,
    /// Number of blocks in each role.
    pub lanes: u32,
    /// Offset in the channel of the words in which the kernel announces its rank; 0 if it does not.
    pub arrivals: u32,
}

/// `Outgoing` in `staged_roles.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct OutgoingArgs {
    /// The message for each rank.
    pub from: PerRank,
    /// Length of each message.
    pub bytes: PerRank,
    /// Not 0 if all messages are the same bytes.
    pub same: u32,
}

/// `Handshake` in `zero_copy.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Handshake {
    /// Offset of the blocks' epochs in the channel.
    pub epochs: u64,
    /// Offset of the handshake's LL lines, or of recv offers, in the channel.
    pub lines: u64,
    /// Offset in the channel of the words that count zero-copy kernels.
    pub counts: u64,
    /// Start of each rank's symmetric memory, as mapped in this process.
    pub heap: PerRank,
    /// A bit for each rank that may directly load the message that this rank sends to it.
    pub give: u32,
    /// A bit for each rank that may directly store its message at the destination on this rank.
    pub take: u32,
    /// The report's word that counts the channel's zero-copy collectives or sends, as an index from
    /// [`DIRECT_WORD`]. The next word counts the channel's zero-copy receives.
    pub count: u32,
    /// Minimum length of a zero-copy message of an exchange; not 0.
    pub least: u32,
}

/// `ExchangeArgs` in `exchange.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExchangeArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Location of the LL lines.
    pub ll: LowLatencyArgs,
    /// Location of the staging slots.
    pub staging: StagingArgs,
    /// Number of blocks that use LL lines.
    pub ll_blocks: u32,
    /// Maximum length of a message on LL lines; longer ones are staged.
    pub short_bytes: u64,
    /// Messages that this rank sends.
    pub out: OutgoingArgs,
    /// Destination of each rank's message.
    pub to: PerRank,
    /// Length of each rank's message.
    pub bytes: PerRank,
    /// Handshake of zero-copy calls.
    pub handshake: Handshake,
}

/// `TransfersArgs` in `exchange/send_recv.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TransfersArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Location of the staging slots.
    pub staging: StagingArgs,
    /// Messages that this rank sends.
    pub out: OutgoingArgs,
    /// Destination of each rank's message.
    pub to: PerRank,
    /// Length of each rank's message.
    pub bytes: PerRank,
    /// Recv offers: `take` has a bit for each offer that this rank makes, `give` a bit for each
    /// offer that it polls for.
    pub handshake: Handshake,
    /// Offset of the `MessageWords` of messages that this rank sends.
    pub send_words: u32,
    /// Offset of the `MessageWords` of messages that this rank receives.
    pub receive_words: u32,
    /// A bit for each rank to which the kernel announces this rank as the sender of a message.
    pub announce_sends: u32,
    /// A bit for each rank to which the kernel announces this rank as the receiver of a message.
    pub announce_receives: u32,
}

/// `ReduceArgs` in `reduce/low_latency.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ReduceLowLatencyArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Location of the LL lines.
    pub ll: LowLatencyArgs,
    /// Message for each rank; 0 if absent.
    pub from: PerRank,
    /// Length of the message for each rank.
    pub send: PerRank,
    /// Destination of the result; 0 if this rank gets none.
    pub to: u64,
    /// Length of the result.
    pub bytes: u64,
    /// Factor of PREMUL_SUM.
    pub factor: f64,
}

/// `ReduceStagedArgs` in `reduce/staged.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ReduceStagedArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Location of the staging slots.
    pub staging: StagingArgs,
    /// Messages that this rank sends.
    pub out: OutgoingArgs,
    /// Destination of the result; 0 if this rank gets none.
    pub to: u64,
    /// Length of the result.
    pub bytes: u64,
    /// Factor of PREMUL_SUM.
    pub factor: f64,
    /// Handshake of zero-copy calls.
    pub handshake: Handshake,
}

/// `AllReduceArgs` in `sentinel.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllReduceArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Location of the sentinel slots.
    pub sentinel: SentinelArgs,
    /// The input.
    pub from: u64,
    /// The result.
    pub to: u64,
    /// Length of the input and of the result.
    pub bytes: u64,
    /// Factor of PREMUL_SUM.
    pub factor: f64,
}

/// `CubeMeshArgs` in `all_reduce/cube_mesh.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CubeMeshArgs {
    /// Arguments that every kernel has; of `peer`, only the entries of neighbours and this rank are
    /// used.
    pub common: CommonArgs,
    /// Location of the LL lines.
    pub ll: LowLatencyArgs,
    /// The input.
    pub from: u64,
    /// The result.
    pub to: u64,
    /// Length of the input and of the result.
    pub bytes: u64,
    /// Factor of PREMUL_SUM.
    pub factor: f64,
    /// The other ranks of this rank's quad, in ascending order.
    pub quad: [u32; 3],
    /// The neighbour in the other quad.
    pub relay: u32,
    /// Not 0 if rank 0 is in this rank's quad.
    pub first_quad: u32,
}

/// `RsagStagedArgs` in `rsag_staged.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RsagStagedArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Staging of the first pass.
    pub scatter: StagingArgs,
    /// Staging of the second pass.
    pub gather: StagingArgs,
    /// The input.
    pub from: u64,
    /// The result; 0 if absent.
    pub to: u64,
    /// Length of the input and of the result.
    pub bytes: u64,
    /// Factor of PREMUL_SUM.
    pub factor: f64,
    /// Root of a broadcast.
    pub root: u32,
    /// Number of pieces of the message.
    pub parts: u32,
    /// The rank that owns the first piece.
    pub first: u32,
    /// Mask of the ranks that get the result of a reduction.
    pub targets: u32,
    /// Handshake of zero-copy calls.
    pub handshake: Handshake,
}

/// `NormArgs` in `norm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NormArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Location of the sentinel slots.
    pub sentinel: SentinelArgs,
    /// This rank's input, or the sum over ranks.
    pub from: u64,
    /// The residual.
    pub residual: u64,
    /// The weight.
    pub weight: u64,
    /// Scale of all normalised elements; 0 if absent.
    pub scale: u64,
    /// Destination of the normalised rows.
    pub normed: u64,
    /// Destination of the sum with the residual.
    pub sum: u64,
    /// Destination of each row's scale; 0 if absent.
    pub scales: u64,
    /// Number of rows.
    pub rows: u64,
    /// Number of elements of a row.
    pub hidden: u32,
    /// Number added to the mean of the squares.
    pub eps: f32,
    /// The code of a `Normed`.
    pub normed_type: u32,
}

/// `CopySyncArgs` in `copy_engine/sync.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CopySyncArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Offset of the `CopyWords` in the channel.
    pub words: u64,
    /// The step that the kernel posts to all peers as sent; 0 if it posts no such step.
    pub post_arrived: u32,
    /// The last step that the kernel allows all peers to send; 0 if it posts no credit.
    pub post_credit: u32,
    /// The step whose chunks the kernel waits for, from all peers; 0 if it waits for no chunks.
    pub wait_arrived: u32,
    /// The step whose credit the kernel waits for, from all peers; 0 if it waits for no credit.
    pub wait_credit: u32,
    /// Number of steps of the call in the last kernel of the call; 0 in all others.
    pub advance: u32,
    /// Not 0 if the steps publish no data, so that they need no order.
    pub bare: u32,
}

/// `CopySumArgs` in `copy_engine/sum.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopySumArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Address of each rank's bytes.
    pub from: PerRank,
    /// The sum.
    pub to: u64,
    /// Length of the sum.
    pub bytes: u64,
}

/// `CopyPushArgs` in `copy_engine/push.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyPushArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// The message.
    pub from: u64,
    /// Its destination on the peer.
    pub to: u64,
    /// Length of the message.
    pub bytes: u64,
}

/// `MessageSyncArgs` in `copy_engine/message.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MessageSyncArgs {
    /// Arguments that every kernel has.
    pub common: CommonArgs,
    /// Offset of this end's `MessageWords` in the channel.
    pub own: u64,
    /// Offset of the other end's `MessageWords` in the channel.
    pub other: u64,
    /// The rank at the other end.
    pub rank: u32,
    /// The step that the kernel posts; 0 if it posts none.
    pub post: u32,
    /// The step of the other end for which the kernel waits; 0 if it waits for none.
    pub wait: u32,
    /// Number of steps of the message in its last kernel; 0 in all others.
    pub advance: u32,
    /// Not 0 if the step publishes no data, so that it needs no order.
    pub bare: u32,
}

/// Maximum number of ranks in a group whose ranks signal each other.
pub const MAX_PEERS: usize = 8;

/// `SignalArgs` in `signal/signal.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SignalArgs {
    /// Pad of each rank, as mapped in this process.
    pub pads: [u64; MAX_PEERS],
    /// Address of a word of host memory that is not 0 once the group has failed.
    pub stop: u64,
    /// Address of the report: two words of host memory.
    pub report: u64,
    /// Timeout of a waiting thread in nanoseconds.
    pub timeout: u64,
    /// Index of the slot's first word in a pad.
    pub slot: u32,
    /// The word that the kernel reports at a timeout, to which it adds a bit for each missing peer.
    pub record: u32,
    /// A bit for each peer that gets a signal.
    pub put: u32,
    /// A bit for each peer whose signal the kernel waits for.
    pub wait: u32,
}

impl SignalArgs {
    /// Returns the arguments as the kernel reads them.
    pub fn bytes(&self) -> &[u8] {
        bytes_of(self)
    }
}

/// The arguments of any kernel of collectives, as the kernel reads them.
#[derive(Clone, Copy)]
#[repr(align(8))]
pub struct ArgBytes {
    bytes: [u8; MAX_ARGS],
    length: usize,
}

/// Size of the largest arguments in bytes.
const MAX_ARGS: usize = size_of::<ExchangeArgs>();

impl ArgBytes {
    pub(super) fn of<T: Copy>(args: &T) -> Self {
        const { assert!(size_of::<T>() <= MAX_ARGS) }
        let mut bytes = [0; _];
        bytes[..size_of::<T>()].copy_from_slice(bytes_of(args));
        Self { bytes, length: size_of::<T>() }
    }

    /// Returns the bytes that a kernel reads.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl std::fmt::Debug for ArgBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes of arguments", self.length)
    }
}

/// Returns the bytes of `args` as a kernel reads them. `args` is one of the structs of this module:
/// `repr(C)`, of plain numbers.
pub(crate) fn bytes_of<T: Copy>(args: &T) -> &[u8] {
    // SAFETY: plain numbers; padding is only copied.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(args).cast(), size_of::<T>()) }
}

/// Number of words of a `Report` in `wait.cuh`.
pub const REPORT_WORDS: usize = DIRECT_WORD + COUNTS * Channel::ALL.len();
/// Number of words of a channel that count zero-copy kernels: one for collectives or sends, and one
/// for receives.
pub const COUNTS: usize = 2;
/// Index of the first of these words in the report.
pub const DIRECT_WORD: usize = 4 + MAX_RANKS;

// `static_assert`s next to the declarations in C++ check the same sizes.
const _: () = {
    assert!(size_of::<CommonArgs>() == 160 && REPORT_WORDS * 4 == 112);
    assert!(size_of::<Handshake>() == 168);
    assert!(size_of::<ExchangeArgs>() == 920);
    assert!(size_of::<TransfersArgs>() == 896);
    assert!(size_of::<ReduceLowLatencyArgs>() == 464);
    assert!(size_of::<ReduceStagedArgs>() == 648);
    assert!(size_of::<AllReduceArgs>() == 216);
    assert!(size_of::<RsagStagedArgs>() == 440);
    assert!(size_of::<CubeMeshArgs>() == 240);
    assert!(size_of::<NormArgs>() == 264);
    assert!(size_of::<CopySyncArgs>() == 192 && size_of::<CopySumArgs>() == 304);
    assert!(size_of::<CopyPushArgs>() == 184 && size_of::<MessageSyncArgs>() == 200);
    assert!(size_of::<SignalArgs>() == 8 * MAX_PEERS + 40);
};
