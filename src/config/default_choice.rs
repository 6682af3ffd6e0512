//! Options that later groups take from the default group.

use crate::lock::lock;
use crate::sys::fork::PerProcess;
use std::sync::Mutex;

/// The choice of this process's default group, which groups without a choice of their own use.
pub struct DefaultChoice<T: 'static>(PerProcess<Mutex<Option<T>>>);

impl<T: Copy + Send> DefaultChoice<T> {
    /// Nothing is chosen yet.
    pub const fn unset() -> Self {
        Self(PerProcess::new(|| Mutex::new(None)))
    }

    /// Returns what `choose` makes of the usual choice: the default group's, or `setting` for the
    /// default group itself and in a process without one.
    pub fn choose<E>(
        &self,
        setting: T,
        is_default: bool,
        choose: impl FnOnce(T) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut default = lock(self.0.get());
        let chosen = choose(default.filter(|_| !is_default).unwrap_or(setting))?;
        if is_default {
            *default = Some(chosen);
        }
        Ok(chosen)
    }
}
