//! Options that later groups take from the default group.

use crate::lock::lock;
use crate::sys::fork::PerProcess;
use std::sync::Mutex;

/// The choice of this process's default group, which groups without a choice of their own use.
pub struct DefaultChoice<T: 'static>(PerProcess<Mutex<Option<T>>>);

impl<T: Copy + Send> DefaultChoice<T> {
    /// Makes the state before the default group has chosen.
    pub const fn unset() -> Self {
        Self(PerProcess::new(|| Mutex::new(None)))
    }

    /// Returns the result of `choose` for the usual choice. That is the choice of the default
    /// group, or `setting` for the default group itself and in a process without a default group.
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
