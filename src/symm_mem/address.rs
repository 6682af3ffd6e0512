//! The address at which the peers of a group find a heap.

use super::frame::HeapKey;

/// The address of a heap, which only members of a group with the heap's process receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapAddress {
    /// Key of the heap.
    pub key: HeapKey,
    /// Name of its listener. It differs from the key, because every process can read such names in
    /// /proc.
    pub listener: HeapKey,
    /// Size of its address range in bytes.
    pub span: u64,
}

impl HeapAddress {
    /// Length of the encoded address.
    pub const BYTES: usize = 40;

    /// Encodes the address for a peer.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.key);
        bytes[16..32].copy_from_slice(&self.listener);
        bytes[32..].copy_from_slice(&self.span.to_le_bytes());
        bytes
    }

    /// Decodes the address that a peer encoded.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let key = |at: usize| std::array::from_fn(|i| bytes[at + i]);
        Self {
            key: key(0),
            listener: key(16),
            span: u64::from_le_bytes(std::array::from_fn(|i| bytes[32 + i])),
        }
    }

    pub(super) fn name(&self) -> String {
        format!("symm-heap{:032x}", u128::from_be_bytes(self.listener))
    }
}
