//! The kernel that sends and receives messages.

use super::{Launch, LaunchContext};
use crate::coll::call::Span;
use crate::coll::cuda::arguments::{ArgBytes, Handshake, OutgoingArgs, PerRank, TransfersArgs};
use crate::coll::cuda::kernel_spec::TRANSFERS;
use crate::coll::cuda::plan::CudaPlan;
use crate::coll::cuda::workspace::layout::{MAX_RANKS, StagingPass};
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::Grid;

impl LaunchContext<'_> {
    /// Returns one kernel for `sends` (the other rank, and the bytes to send) and `receives` (the
    /// other rank, and their destination). `announced` has a bit for each rank to which the kernel
    /// announces this rank, as the sender and as the receiver of a message. Fails for two messages
    /// in one direction between the same two ranks, which need two kernels.
    pub fn transfers(
        &self,
        sends: &[(usize, Span)],
        receives: &[(usize, Span)],
        announced: [u32; 2],
        plan: CudaPlan,
    ) -> Result<Launch> {
        let (mut out, mut to, mut bytes) =
            (OutgoingArgs::default(), [0; MAX_RANKS], [0; MAX_RANKS]);
        let twice = || {
            Error::internal(
                "two messages in one direction between the same two ranks in one launch",
            )
        };
        for &(r, span) in sends {
            if out.from[r] != 0 {
                return Err(twice());
            }
            (out.from[r], out.bytes[r]) = (span.addr as u64, span.bytes as u64);
        }
        for &(r, span) in receives {
            if to[r] != 0 {
                return Err(twice());
            }
            (to[r], bytes[r]) = (span.addr as u64, span.bytes as u64);
        }
        let CudaPlan::Exchange { lanes, .. } = plan else {
            unreachable!("transfers are exchanges")
        };
        let least = self.symmetric.map_or(u64::MAX, |symmetric| u64::from(symmetric.least));
        let long = |bytes: &PerRank, r: usize| r != self.me && bytes[r] >= least;
        let offered = |r: usize| {
            long(&bytes, r) && self.direct(Span { addr: to[r] as usize, bytes: bytes[r] as usize })
        };
        let mask =
            |yes: &dyn Fn(usize) -> bool| (0..self.n).filter(|&r| yes(r)).map(|r| 1 << r).sum();
        let (give, take) = (mask(&|r| long(&out.bytes, r)), mask(&offered));
        let handshake =
            Handshake { lines: self.layout.offers() as u64, ..self.handshake(give, take) };
        let staging = self.staging(StagingPass::Scatter, lanes, self.layout.slot_bytes() as u32);
        let threads = self.lane_threads(&TRANSFERS, lanes);
        let words = |send| self.layout.message_words(send) as u32;
        let [announce_sends, announce_receives] = announced;
        let args = ArgBytes::of(&TransfersArgs {
            common: self.common,
            staging,
            out,
            to,
            bytes,
            handshake,
            send_words: words(true),
            receive_words: words(false),
            announce_sends,
            announce_receives,
        });
        Ok(Launch {
            kernel: &TRANSFERS,
            grid: Grid::new(2 * lanes, threads),
            zero_copy: false,
            args,
        })
    }
}
