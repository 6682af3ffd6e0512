//! One file of the cache.

use sha2::{Digest, Sha256};

/// The first bytes of a file; the last of them is the version of this format.
const MAGIC: [u8; 8] = *b"symmcub\x01";

/// Size of the header before the code: magic, length of the code, digest.
pub(super) const HEADER: usize = 8 + 8 + 32;

/// The name of machine code: a hash of everything from which it was compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheKey([u8; 32]);

impl CacheKey {
    /// Returns the key for this list of texts.
    pub(super) fn over<'a>(parts: impl Iterator<Item = &'a str>) -> Self {
        let mut hash = Sha256::new_with_prefix(MAGIC);
        for part in parts {
            // With the length, so that moving text from one part to the next gives another key.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    /// Returns the name of the file.
    pub(super) fn file(&self) -> String {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{digits}.cubin")
    }

    /// Returns a digest of the code and its key, so that a file under another key's name is
    /// rejected like a damaged one.
    fn digest(&self, code: &[u8]) -> [u8; 32] {
        Sha256::new_with_prefix(self.0).chain_update(code).finalize().into()
    }

    /// Returns the content of the file for `code`.
    pub(super) fn seal(&self, code: &[u8]) -> Vec<u8> {
        [&MAGIC[..], &(code.len() as u64).to_le_bytes(), &self.digest(code), code].concat()
    }

    /// Returns the code in a file's content, or what is wrong with it.
    pub(super) fn unseal(&self, mut content: Vec<u8>) -> Result<Vec<u8>, String> {
        let Some((header, code)) = content.split_at_checked(HEADER) else {
            return Err(format!("has {} bytes, less than its header of {HEADER}", content.len()));
        };
        if header[..8] != MAGIC {
            return Err("is no compiled kernel of this version's format".into());
        }
        if header[8..16] != (code.len() as u64).to_le_bytes() {
            return Err(format!(
                "holds {} bytes of code, not as many as its header says",
                code.len()
            ));
        }
        if header[16..] != self.digest(code) {
            return Err(format!("is damaged: the checksum of its {} bytes is wrong", code.len()));
        }
        content.drain(..HEADER);
        Ok(content)
    }
}
