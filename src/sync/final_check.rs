//! Distinguishes a peer that will never arrive from one that arrived just before it left.

/// Returns `end`, the reason why no more peers arrive, unless the `missing` peer has arrived
/// meanwhile, which is checked again after the reason was seen. A rank that finished its part and
/// then left, exited or failed in a later call therefore does not disturb peers that still wait for
/// that part.
pub fn lost<T>(missing: impl Fn() -> bool, end: impl FnOnce() -> Option<T>) -> Option<T> {
    if missing() { end().filter(|_| missing()) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn an_end_counts_only_for_what_is_still_missing_after_it() {
        assert_eq!(lost(|| true, || Some("died")), Some("died"));
        assert_eq!(lost(|| true, || None::<&str>), None);
        assert_eq!(lost(|| false, || -> Option<&str> { panic!("nothing is missing") }), None);
        let came = Cell::new(false);
        let came_then_left = || {
            came.set(true);
            Some("left")
        };
        assert_eq!(lost(|| !came.get(), came_then_left), None);
    }
}
