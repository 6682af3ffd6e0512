//! Options that later groups take from the default group.

use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sys::fork::PerProcess;
use std::sync::Mutex;

/// Returns the one of `all` whose name is `value`; nothing if `value` is empty, which chooses none.
///
/// # Errors
/// `Value`, with the names, if `value` is not one of them.
pub fn named_choice<T: Copy>(
    option: &str,
    value: &str,
    all: &[T],
    name: impl Fn(T) -> &'static str,
) -> Result<Option<T>> {
    let chosen = all.iter().copied().find(|&each| name(each) == value);
    if chosen.is_none() && !value.is_empty() {
        let names: Vec<String> = all.iter().map(|&each| format!("{:?}", name(each))).collect();
        return Err(Error::value(format!("{option}={value:?} is not one of {}", names.join(", "))));
    }
    Ok(chosen)
}

/// The choice of this process's default group, which groups without a choice of their own use.
pub struct DefaultChoice<T: 'static>(PerProcess<Mutex<Option<T>>>);

impl<T: Copy + Send> DefaultChoice<T> {
    /// Makes the state before the default group has chosen.
    pub const fn unset() -> Self {
        Self(PerProcess::new(|| Mutex::new(None)))
    }

    /// Returns the result of `choose` for the usual choice. That is the choice of the default
    /// group, or `setting` for the default group itself and in a process without a default group.
    pub fn choose(
        &self,
        setting: T,
        is_default: bool,
        choose: impl FnOnce(T) -> Result<T>,
    ) -> Result<T> {
        let mut default = lock(self.0.get());
        let chosen = choose(default.filter(|_| !is_default).unwrap_or(setting))?;
        if is_default {
            *default = Some(chosen);
        }
        Ok(chosen)
    }
}
