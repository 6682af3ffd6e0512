//! Where in the user's program a call stands, under `SYMM_DEBUG=site`.

use crate::sys::fork::PerProcess;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard};

/// A line of the user's program.
#[derive(Debug, PartialEq, Eq)]
pub struct Site {
    text: String,
    hash: u64,
}

#[derive(Default)]
struct Known {
    all: Vec<&'static Site>,
    numbers: HashMap<&'static str, u32>,
}

/// Never forgotten: there are no more than lines in the program.
static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new(|| Mutex::new(Known::default()));

fn known() -> MutexGuard<'static, Known> {
    KNOWN.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Site {
    /// The number of the site that `text` names, from 1.
    pub fn number(text: &str) -> u32 {
        let mut known = known();
        if let Some(&number) = known.numbers.get(text) {
            return number;
        }
        // FNV-1a: the same on all ranks.
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let site: &'static Site = Box::leak(Box::new(Self { text: text.into(), hash }));
        known.all.push(site);
        let number = known.all.len() as u32;
        known.numbers.insert(&site.text, number);
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

/// Bytes of an inscription.
const BYTES: usize = 128;

/// The end of a site's text in shared memory, where peers read it: the line stands there, and the file's own name.
#[repr(C)]
pub struct Inscription([AtomicU8; BYTES]);

impl Inscription {
    /// Writes `site`; who reads it needs a flag that is published afterwards.
    pub fn write(&self, site: &Site) {
        let mut start = site.text.len().saturating_sub(BYTES);
        while !site.text.is_char_boundary(start) {
            start += 1;
        }
        let tail = site.text[start..].bytes().chain(std::iter::repeat(0));
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
        let (one, two) = (Site::number("one.py:1"), Site::number("two.py:1"));
        assert_eq!(one, Site::number("one.py:1"));
        let (one, two) = (Site::known(one).expect("known"), Site::known(two).expect("known"));
        assert_eq!((one.text(), two.text()), ("one.py:1", "two.py:1"));
        assert_ne!(one.hash(), two.hash());
        let vector = Site::known(Site::number("foobar")).expect("known");
        assert_eq!(vector.hash(), 0x8594_4171_f739_67e8, "FNV-1a");
        assert_eq!(Site::known(0), None);
        assert_eq!(Site::known(u32::MAX), None);
    }

    #[test]
    fn inscriptions_keep_the_end() {
        let inscription = Inscription(std::array::from_fn(|_| AtomicU8::new(b'x')));
        for (letter, times, end) in [("a", 1, ".py:1"), ("é", 200, ".py:22"), ("é", 200, ".py:4"), ("d", 121, ".py:333")] {
            let text = letter.repeat(times) + end;
            inscription.write(Site::known(Site::number(&text)).expect("known"));
            let read = inscription.read();
            assert!(text.ends_with(&read) && (read == text || read.len() > BYTES - 2), "{read}");
        }
    }
}
