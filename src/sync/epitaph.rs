//! Telling a peer that will not come from one that came just before it left.

/// `end`, a reason why nobody else comes, unless what was `missing` has come meanwhile: it is asked again after the reason was seen. So a
/// rank that finished its part and then left, died or failed in a later call disturbs nobody who still waits for that part.
pub fn lost<T>(missing: impl Fn() -> bool, end: impl FnOnce() -> Option<T>) -> Option<T> {
    if missing() { end().filter(|_| missing()) } else { None }
}
