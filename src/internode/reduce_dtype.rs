//! The choice of the type of a group's partial sums.

pub use crate::coll::two_level::levels::ReduceDtype;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sys::fork::PerProcess;
use std::sync::Mutex;

/// The default group's choice.
static DEFAULT: PerProcess<Mutex<ReduceDtype>> = PerProcess::new(Mutex::default);

impl ReduceDtype {
    /// Returns the choice of a group that passes `named`; without a choice of its own it uses the default group's.
    ///
    /// # Errors
    /// `Value` if `named` is not a valid choice.
    pub fn chosen(named: &str, is_default: bool) -> Result<Self> {
        let mut default = lock(DEFAULT.get());
        let chosen = match named {
            "" if is_default => Self::default(),
            "" => *default,
            "tensor" => Self::Tensor,
            "float32" => Self::Fp32,
            _ => return Err(Error::value(format!("reduce_dtype={named:?} is not one of \"tensor\", \"float32\""))),
        };
        if is_default {
            *default = chosen;
        }
        Ok(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_groups_choose_as_the_default_one_did() {
        assert_eq!(ReduceDtype::chosen("float32", true), Ok(ReduceDtype::Fp32));
        assert_eq!(ReduceDtype::chosen("", false), Ok(ReduceDtype::Fp32));
        assert_eq!(ReduceDtype::chosen("tensor", false), Ok(ReduceDtype::Tensor));
        assert_eq!(ReduceDtype::chosen("", false), Ok(ReduceDtype::Fp32));
        let error = ReduceDtype::chosen("float", false).expect_err("there is none");
        assert_eq!(error.message, "reduce_dtype=\"float\" is not one of \"tensor\", \"float32\"");
        assert_eq!(ReduceDtype::chosen("", true), Ok(ReduceDtype::Tensor));
        assert_eq!(ReduceDtype::chosen("", false), Ok(ReduceDtype::Tensor));
    }
}
