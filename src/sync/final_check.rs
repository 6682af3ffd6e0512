//! Distinguishes a peer that will never arrive from one that arrived just before it left.

/// Returns the reason why a peer will never arrive, if `missing` says that it has not arrived and
/// `end` returns a reason. `missing` is called once more after `end`, because the peer may have
/// finished its part and only then left, exited or failed in a later call. Such a peer must not
/// disturb ranks that wait for that part.
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
