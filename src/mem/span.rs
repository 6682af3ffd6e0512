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

    /// Returns true if the two share a byte.
    pub fn overlaps(self, other: Self) -> bool {
        self.addr.saturating_sub(other.addr) < other.bytes
            && other.addr.saturating_sub(self.addr) < self.bytes
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
    fn spans_overlap_if_they_share_a_byte() {
        let span = |addr, bytes| Span { addr, bytes };
        let shared = |other: Span| {
            assert_eq!(span(8, 4).overlaps(other), other.overlaps(span(8, 4)));
            other.overlaps(span(8, 4))
        };
        for other in [span(8, 4), span(11, 9), span(5, 4), span(9, 1), span(0, 99)] {
            assert!(shared(other), "{other:?}");
        }
        for other in [span(12, 9), span(4, 4), span(8, 0), span(9, 0), span(0, 0)] {
            assert!(!shared(other), "{other:?}");
        }
    }

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
