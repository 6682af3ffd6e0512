//! Where in the user's program a call stands, under `SYMM_DEBUG=call_site`.

use crate::sys::fork::PerProcess;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard};

/// A line of the user's program.
#[derive(Debug, PartialEq, Eq)]
pub struct CallSite {
    text: String,
    hash: u64,
}

#[derive(Default)]
struct Known {
    all: Vec<&'static CallSite>,
    numbers: HashMap<&'static str, u32>,
}

/// Never forgotten: there are no more than lines in the program.
static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new(|| Mutex::new(Known::default()));

fn known() -> MutexGuard<'static, Known> {
    KNOWN.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl CallSite {
    /// The number of the site that `text` names, from 1.
    pub fn number(text: &str) -> u32 {
        let mut known = known();
        if let Some(&number) = known.numbers.get(text) {
            return number;
        }
        // FNV-1a: the same on all ranks.
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let call_site: &'static CallSite = Box::leak(Box::new(Self { text: text.into(), hash }));
        known.all.push(call_site);
        let number = known.all.len() as u32;
        known.numbers.insert(&call_site.text, number);
        number
    }

    /// The site with this number; `None` for 0.
    pub fn known(number: u32) -> Option<&'static Self> {
        if number == 0 { None } else { known().all.get(number as usize - 1).copied() }
    }

    /// "train.py:12"
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Differs where texts differ.
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

/// Bytes of an text of a call site.
const BYTES: usize = 128;

/// The end of a site's text in shared memory, where peers read it: the line stands there, and the file's own name.
#[repr(C)]
pub struct CallSiteText([AtomicU8; BYTES]);

impl CallSiteText {
    /// Writes `call_site`; who reads it needs a flag that is published afterwards.
    pub fn write(&self, call_site: &CallSite) {
        let mut start = call_site.text.len().saturating_sub(BYTES);
        while !call_site.text.is_char_boundary(start) {
            start += 1;
        }
        let tail = call_site.text[start..].bytes().chain(std::iter::repeat(0));
        self.0.iter().zip(tail).for_each(|(cell, byte)| cell.store(byte, Ordering::Relaxed));
    }

    /// What was written last.
    pub fn read(&self) -> String {
        let bytes: Vec<u8> = self.0.iter().map(|cell| cell.load(Ordering::Relaxed)).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_are_known_by_their_numbers() {
        let (one, two) = (CallSite::number("one.py:1"), CallSite::number("two.py:1"));
        assert_eq!(one, CallSite::number("one.py:1"));
        let (one, two) = (CallSite::known(one).expect("known"), CallSite::known(two).expect("known"));
        assert_eq!((one.text(), two.text()), ("one.py:1", "two.py:1"));
        assert_ne!(one.hash(), two.hash());
        let vector = CallSite::known(CallSite::number("foobar")).expect("known");
        assert_eq!(vector.hash(), 0x8594_4171_f739_67e8, "FNV-1a");
        assert_eq!(CallSite::known(0), None);
        assert_eq!(CallSite::known(u32::MAX), None);
    }

    #[test]
    fn call_site_texts_keep_the_end() {
        let call_site_text = CallSiteText(std::array::from_fn(|_| AtomicU8::new(b'x')));
        for (letter, times, end) in [("a", 1, ".py:1"), ("é", 200, ".py:22"), ("é", 200, ".py:4"), ("d", 121, ".py:333")] {
            let text = letter.repeat(times) + end;
            call_site_text.write(CallSite::known(CallSite::number(&text)).expect("known"));
            let read = call_site_text.read();
            assert!(text.ends_with(&read) && (read == text || read.len() > BYTES - 2), "{read}");
        }
    }
}
