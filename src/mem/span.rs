//! A contiguous piece of memory as a plain value.

/// A contiguous piece of a tensor's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Span {
    /// Address of the first byte, with any alignment; ignored if `bytes` is 0.
    pub addr: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl Span {
    /// Returns a pointer to the first byte.
    pub fn ptr(self) -> *mut u8 {
        self.addr as *mut u8
    }

    /// Returns the single piece that `spans` form if each starts where the previous one ends; empty
    /// spans may be anywhere. `None` if they do not form a single piece, or if there are no spans.
    pub fn joined(spans: &[Self]) -> Option<Self> {
        let mut some = spans.iter().filter(|span| span.bytes > 0);
        let mut whole = *some.next().or(spans.first())?;
        for span in some {
            if whole.addr.checked_add(whole.bytes)? != span.addr {
                return None;
            }
            whole.bytes += span.bytes;
        }
        Some(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_that_follow_each_other_are_one() {
        let span = |addr, bytes| Span { addr, bytes };
        assert_eq!(
            Span::joined(&[span(8, 4), span(12, 0), span(99, 0), span(12, 2)]),
            Some(span(8, 6))
        );
        assert_eq!(Span::joined(&[span(8, 4), span(13, 2)]), None);
        assert_eq!(Span::joined(&[span(5, 0), span(9, 0)]), Some(span(5, 0)));
        assert_eq!(Span::joined(&[span(usize::MAX, 1), span(0, 1)]), None);
        assert_eq!(Span::joined(&[]), None);
    }
}
