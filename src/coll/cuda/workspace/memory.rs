//! The memory through which the GPUs of a group exchange data: created, distributed, mapped and
//! tested.
//!
//! Each GPU has a part of this memory. If some pair of GPUs cannot access each other, all parts are
//! host memory instead, under the same protocols.
#![allow(unsafe_code, reason = "the device memory of a communicator")]

use super::layout::{Channel, ChannelLayout};
use crate::bootstrap::fd_exchange::{Mailbox, NAME_BYTES};
use crate::coll::cuda::plan::CudaThresholds;
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::{Device, Stream};
use crate::lock::lock;
use crate::mem::pinned::RegisteredMemory;
use crate::mem::shm::ShmSegment;
use crate::mem::vmm::{self, DeviceAllocation, DeviceMapping};
use crate::rank::Rank;
use crate::symm_mem::HeapAddress;
use crate::sync::timeout::CallTimeout;
use crate::sys::interrupt::Interrupts;
use rustix::fd::{AsFd, OwnedFd};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// The description of itself that a rank sends to the others before they create any memory.
pub(in crate::coll::cuda) struct PeerInfo {
    pub(in crate::coll::cuda) uuid: [u8; 16],
    pub(in crate::coll::cuda) mailbox: [u8; NAME_BYTES],
    pub(in crate::coll::cuda) workspace: u64,
    pub(in crate::coll::cuda) p2p: bool,
    /// Address of the rank's heap, if it has one.
    pub(in crate::coll::cuda) heap: Option<HeapAddress>,
    pub(in crate::coll::cuda) tuning: CudaThresholds,
    /// Number of the GPU's processors, and whether it has clusters.
    pub(in crate::coll::cuda) processors: u64,
    pub(in crate::coll::cuda) clusters: bool,
}

impl PeerInfo {
    /// Length of the encoded description.
    pub(in crate::coll::cuda) const BYTES: usize =
        16 + NAME_BYTES + 19 + HeapAddress::BYTES + CudaThresholds::BYTES;

    pub(in crate::coll::cuda) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.uuid.to_vec();
        bytes.extend(self.mailbox);
        bytes.extend(self.workspace.to_le_bytes());
        bytes.extend(self.processors.to_le_bytes());
        bytes.extend([self.p2p, self.clusters, self.heap.is_some()].map(u8::from));
        bytes.extend(self.heap.map_or([0; HeapAddress::BYTES], |heap| heap.encode()));
        bytes.extend(self.tuning.encode());
        bytes
    }

    pub(in crate::coll::cuda) fn decode(bytes: &[u8]) -> Option<Self> {
        let (uuid, rest) = bytes.split_first_chunk()?;
        let (mailbox, rest) = rest.split_first_chunk()?;
        let (workspace, rest) = rest.split_first_chunk()?;
        let (processors, rest) = rest.split_first_chunk()?;
        let ([p2p, clusters, heap], rest) = rest.split_first_chunk()?;
        let (address, rest) = rest.split_first_chunk()?;
        let (workspace, processors, tuning) = (
            u64::from_le_bytes(*workspace),
            u64::from_le_bytes(*processors),
            CudaThresholds::decode(rest)?,
        );
        let heap = (*heap == 1).then(|| HeapAddress::decode(address));
        Some(Self {
            uuid: *uuid,
            mailbox: *mailbox,
            workspace,
            p2p: *p2p == 1,
            heap,
            tuning,
            processors,
            clusters: *clusters == 1,
        })
    }
}

/// Memory of all ranks, as this rank's GPU accesses it.
pub(in crate::coll::cuda) enum PeerWorkspaces {
    /// Mappings of memory on the GPUs; `None` for a rank that is deliberately not mapped, or has
    /// exited.
    Device(Mutex<Vec<Option<DeviceMapping>>>),
    /// Registered host memory.
    Host(Vec<RegisteredMemory>),
}

/// The context for sharing memory with the peers.
pub(in crate::coll::cuda) struct SetupContext<'a> {
    pub(in crate::coll::cuda) control: &'a ControlBlock,
    pub(in crate::coll::cuda) device: &'a Device,
    pub(in crate::coll::cuda) mailbox: &'a Mailbox,
    pub(in crate::coll::cuda) peers: &'a [PeerInfo],
    pub(in crate::coll::cuda) limit: &'a CallTimeout,
}

impl SetupContext<'_> {
    /// Sends `own` to all peers and returns the peers' descriptors by rank; this rank's entry is
    /// empty.
    fn pass(&self, own: &OwnedFd) -> Result<Vec<Option<OwnedFd>>> {
        let names: Vec<_> = self.peers.iter().map(|peer| peer.mailbox).collect();
        let pids: Vec<u32> = self.control.ranks().map(|rank| self.control.pid(rank)).collect();
        // This rank itself may also be leaving, on another thread.
        let left = |rank| {
            self.control
                .exit_reason(rank)
                .map(|how| Error::peer(format!("{} {how}", self.control.describe(rank))))
        };
        let interrupts = RefCell::new(Interrupts::new());
        let check = || {
            self.control
                .failure()
                .or_else(|| self.control.ranks().find_map(left))
                .map_or(Ok(()), Err)?;
            let about = "the exchange of GPU memory";
            interrupts.borrow_mut().check().map_err(|_| self.control.interrupted(about))
        };
        let passed = self.mailbox.exchange_fds(
            self.control.rank().index(),
            &names,
            &pids,
            own.as_fd(),
            self.limit,
            &check,
        );
        // Peers may wait for this rank's descriptor; failing the group notifies them.
        passed.map_err(|error| self.control.fail(error))
    }
}

/// This rank's memory, before the peers have it.
pub(in crate::coll::cuda) enum LocalWorkspace {
    /// Memory on this rank's GPU.
    Device(DeviceAllocation, OwnedFd, usize),
    /// Host memory.
    Host(OwnedFd, usize),
}

impl LocalWorkspace {
    /// Allocates `bytes` on the GPU.
    pub(in crate::coll::cuda) fn on_device(device: &Device, bytes: usize) -> Result<Self> {
        let bytes = bytes.next_multiple_of(vmm::granularity(device)?);
        let own = DeviceAllocation::create(device, bytes)?;
        let descriptor = own.export()?;
        Ok(Self::Device(own, descriptor, bytes))
    }

    /// Allocates `bytes` of host memory.
    pub(in crate::coll::cuda) fn on_host(bytes: usize) -> Result<Self> {
        let bytes = bytes.next_multiple_of(4096);
        Ok(Self::Host(ShmSegment::create(bytes)?, bytes))
    }
}

impl PeerWorkspaces {
    /// Maps `own` and the memory of the peers that this rank `reaches`. All ranks must have created
    /// their memory, because a rank without memory would not take part in the exchange.
    pub(in crate::coll::cuda) fn shared(
        way: &SetupContext<'_>,
        own: LocalWorkspace,
        reaches: &dyn Fn(usize) -> bool,
    ) -> Result<Self> {
        match own {
            LocalWorkspace::Device(own, descriptor, bytes) => {
                let map = |(rank, fd): (usize, Option<OwnedFd>)| match fd {
                    None => own.map(way.device).map(Some),
                    Some(fd) if reaches(rank) => {
                        DeviceAllocation::import(&fd, bytes)?.map(way.device).map(Some)
                    }
                    Some(_) => Ok(None),
                };
                let mappings = way
                    .pass(&descriptor)?
                    .into_iter()
                    .enumerate()
                    .map(map)
                    .collect::<Result<_>>()?;
                Ok(Self::Device(Mutex::new(mappings)))
            }
            LocalWorkspace::Host(own, bytes) => {
                let descriptors = way.pass(&own)?;
                let mut own = Some(own);
                let open = |fd: Option<OwnedFd>| {
                    let fd = fd
                        .or_else(|| own.take())
                        .ok_or_else(|| Error::internal("a peer passed no memory"))?;
                    let segment = Arc::new(ShmSegment::map(fd, bytes)?);
                    segment.reserve(0, bytes, format_args!("group \"{}\"", way.control.name()))?;
                    // SAFETY: reserved above, and mapped as long as the segment, which is the
                    // keeper, lives.
                    unsafe { RegisteredMemory::new(segment.ptr(0, bytes), bytes, segment) }
                };
                Ok(Self::Host(descriptors.into_iter().map(open).collect::<Result<_>>()?))
            }
        }
    }

    /// Returns the address of each rank's memory; 0 if it is not mapped.
    pub(in crate::coll::cuda) fn addresses(&self) -> Vec<u64> {
        match self {
            Self::Device(mappings) => lock(mappings)
                .iter()
                .map(|mapping| mapping.as_ref().map_or(0, DeviceMapping::address))
                .collect(),
            Self::Host(segments) => segments.iter().map(RegisteredMemory::device).collect(),
        }
    }

    /// Returns true if the memory is on the GPUs.
    pub(in crate::coll::cuda) fn is_direct(&self) -> bool {
        matches!(self, Self::Device(_))
    }

    /// Unmaps the GPU memory of `rank`. No kernel may use it any more.
    pub(in crate::coll::cuda) fn release_dead(&self, rank: Rank) {
        match self {
            Self::Device(mappings) => drop(lock(mappings)[rank.index()].take()),
            // Host memory stays mapped until the group is released.
            Self::Host(_) => {}
        }
    }

    /// Prepares this rank's part for the first call.
    pub(in crate::coll::cuda) fn clear(
        &self,
        me: usize,
        layout: &ChannelLayout,
        stream: Stream,
    ) -> Result<()> {
        let base = self.addresses()[me];
        for channel in Channel::ALL {
            let start = base + layout.channel(channel) as u64;
            stream.fill(start, 0, layout.sentinel())?;
            stream.fill(start + layout.sentinel() as u64, 0xFF, layout.sentinel_bytes())?;
        }
        stream.synchronize()
    }

    /// Writes a different word to each mapped peer's memory and reads it back, because the driver
    /// may report access that does not work.
    pub(in crate::coll::cuda) fn probe(
        &self,
        me: usize,
        layout: &ChannelLayout,
        stream: Stream,
    ) -> Result<bool> {
        let word = |rank: usize| 0x5359_4d4d_0000_0000u64 | (me as u64) << 16 | rank as u64;
        for (rank, base) in
            self.addresses().into_iter().enumerate().filter(|&(rank, base)| rank != me && base != 0)
        {
            let (out, mut back) = (word(rank), 0u64);
            // In a staging slot, whose bytes are never read before a chunk has arrived.
            let at = base + layout.slots(super::layout::StagingPass::Gather) as u64 + me as u64 * 8;
            stream.copy(at, (&raw const out) as u64, 8)?;
            stream.copy((&raw mut back) as u64, at, 8)?;
            stream.synchronize()?;
            if back != out {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns true if the words of all mapped peers, which map this rank too, have arrived here.
    /// Called after all ranks have probed.
    pub(in crate::coll::cuda) fn probed(
        &self,
        me: usize,
        layout: &ChannelLayout,
        stream: Stream,
    ) -> Result<bool> {
        let addresses = self.addresses();
        let base = addresses[me] + layout.slots(super::layout::StagingPass::Gather) as u64;
        for rank in (0..addresses.len()).filter(|&rank| rank != me && addresses[rank] != 0) {
            let mut word = 0u64;
            stream.copy((&raw mut word) as u64, base + rank as u64 * 8, 8)?;
            stream.synchronize()?;
            if word != 0x5359_4d4d_0000_0000u64 | (rank as u64) << 16 | me as u64 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_tells_arrives() {
        let tuning = CudaThresholds::of(4).overlaid("lanes=3").expect("read");
        let heap = Some(HeapAddress { key: [3; 16], listener: [4; 16], span: 1 << 38 });
        let (workspace, processors) = (1 << 40, 132);
        let peer = PeerInfo {
            uuid: [7; 16],
            mailbox: [b'x'; NAME_BYTES],
            workspace,
            p2p: true,
            heap,
            tuning,
            processors,
            clusters: false,
        };
        let bytes = peer.encode();
        assert_eq!(bytes.len(), PeerInfo::BYTES);
        let read = PeerInfo::decode(&bytes).expect("whole");
        assert_eq!(
            (read.uuid, read.mailbox, read.workspace, read.p2p),
            (peer.uuid, peer.mailbox, workspace, true)
        );
        assert_eq!(
            (read.tuning, read.heap, read.processors, read.clusters),
            (tuning, heap, processors, false)
        );
        let without = PeerInfo { heap: None, ..peer }.encode();
        assert_eq!(PeerInfo::decode(&without).map(|read| read.heap), Some(None));
        assert!(PeerInfo::decode(&bytes[1..]).is_none());
    }
}
