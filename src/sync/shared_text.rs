//! A short text in shared memory, which one rank writes and its peers read.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU8, Ordering};

/// Maximum length of a text in bytes.
pub const BYTES: usize = 128;
/// Marks a truncated text.
const CUT: &str = "…";

/// A text of at most 128 bytes. The writer publishes a flag after the text, and a reader must
/// observe that flag before it reads the text.
#[repr(C)]
pub struct SharedText([AtomicU8; BYTES]);

/// Returns the last [`BYTES`] bytes of `text`, because a path has the file name and the line at the
/// end.
pub fn end_of(text: &str) -> &str {
    let mut start = text.len().saturating_sub(BYTES);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// Returns `text`, or its start with the mark of a truncated text if it has more than `most` bytes.
pub fn start_of(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return text.into();
    }
    let mut end = most - CUT.len();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{CUT}", &text[..end]).into()
}

impl SharedText {
    /// Writes the end of `text`, as much as fits.
    pub fn write_end(&self, text: &str) {
        self.write(end_of(text).bytes());
    }

    /// Writes the start of `text`, as much as fits, as one line.
    pub fn write_start(&self, text: &str) {
        let line = text.replace(|c: char| c.is_control(), " ");
        self.write(start_of(&line, BYTES).bytes());
    }

    fn write(&self, bytes: impl Iterator<Item = u8>) {
        self.0
            .iter()
            .zip(bytes.chain(std::iter::repeat(0)))
            .for_each(|(cell, byte)| cell.store(byte, Ordering::Relaxed));
    }

    /// Returns the text that was written last.
    pub fn read(&self) -> String {
        let bytes: Vec<u8> = self
            .0
            .iter()
            .map(|cell| cell.load(Ordering::Relaxed))
            .take_while(|&byte| byte != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> SharedText {
        SharedText(std::array::from_fn(|_| AtomicU8::new(b'x')))
    }

    #[test]
    fn paths_keep_their_end() {
        let shared = text();
        for (letter, times, end) in
            [("a", 1, ".py:1"), ("é", 200, ".py:22"), ("é", 200, ".py:4"), ("d", 121, ".py:333")]
        {
            let text = letter.repeat(times) + end;
            shared.write_end(&text);
            let read = shared.read();
            assert!(text.ends_with(&read) && (read == text || read.len() > BYTES - 2), "{read}");
        }
    }

    #[test]
    fn errors_keep_their_beginning_in_one_line() {
        let shared = text();
        for (text, expected) in
            [("KeyError: 'x'", "KeyError: 'x'"), ("a\nb\tc\0d", "a b c d"), ("", "")]
        {
            shared.write_start(text);
            assert_eq!(shared.read(), expected);
        }
        for letter in ["a", "é", "語", "🦀"] {
            let long = format!("ValueError: {}", letter.repeat(200));
            shared.write_start(&long);
            let read = shared.read();
            let kept = read.strip_suffix(CUT).expect("cut");
            assert!(
                long.starts_with(kept) && read.len() <= BYTES && read.len() > BYTES - 4,
                "{read}"
            );
            shared.write_start(&letter.repeat(BYTES / letter.len()));
            assert_eq!(shared.read(), letter.repeat(BYTES / letter.len()), "it just fits");
        }
    }
}
