//! Call sites: the line of the user's program that makes a call, for `SYMM_DEBUG=call_site`.

use crate::lock::lock;
use crate::sys::fork::PerProcess;
use std::collections::HashMap;
use std::sync::Mutex;

/// A line of the user's program.
#[derive(Debug, PartialEq, Eq)]
pub struct CallSite {
    text: String,
    hash: u64,
}

#[derive(Default)]
struct CallSiteTable {
    all: Vec<&'static CallSite>,
    numbers: HashMap<&'static str, u32>,
}

/// The call sites of this process. They are never freed; there are at most as many as lines in the
/// program.
static KNOWN: PerProcess<Mutex<CallSiteTable>> =
    PerProcess::new(|| Mutex::new(CallSiteTable::default()));

/// Returns the FNV-1a hash of `text`, which is the same on all ranks.
pub fn text_hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl CallSite {
    /// Returns the number of the call site `text`, from 1.
    pub fn number(text: &str) -> u32 {
        let mut known = lock(KNOWN.get());
        if let Some(&number) = known.numbers.get(text) {
            return number;
        }
        let call_site: &'static CallSite =
            Box::leak(Box::new(Self { text: text.into(), hash: text_hash(text) }));
        known.all.push(call_site);
        let number = known.all.len() as u32;
        known.numbers.insert(&call_site.text, number);
        number
    }

    /// Returns the call site with this number; `None` for 0.
    pub fn known(number: u32) -> Option<&'static Self> {
        if number == 0 { None } else { lock(KNOWN.get()).all.get(number as usize - 1).copied() }
    }

    /// Returns the text of the call site, such as "train.py:12".
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the hash of the text.
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_are_known_by_their_numbers() {
        let (one, two) = (CallSite::number("one.py:1"), CallSite::number("two.py:1"));
        assert_eq!(one, CallSite::number("one.py:1"));
        let (one, two) =
            (CallSite::known(one).expect("known"), CallSite::known(two).expect("known"));
        assert_eq!((one.text(), two.text()), ("one.py:1", "two.py:1"));
        assert_ne!(one.hash(), two.hash());
        let vector = CallSite::known(CallSite::number("foobar")).expect("known");
        assert_eq!(vector.hash(), 0x8594_4171_f739_67e8, "FNV-1a");
        assert_eq!(CallSite::known(0), None);
        assert_eq!(CallSite::known(u32::MAX), None);
    }
}
