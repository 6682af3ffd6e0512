//! The choice of the type of a group's partial sums.

pub use crate::coll::two_level::levels::Partials;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sys::fork::PerProcess;
use std::sync::Mutex;

/// The default group's choice.
static DEFAULT: PerProcess<Mutex<Partials>> = PerProcess::new(Mutex::default);

impl Partials {
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
            "fp32" => Self::Fp32,
            _ => return Err(Error::value(format!("partials={named:?} is none of \"tensor\", \"fp32\""))),
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
        assert_eq!(Partials::chosen("fp32", true), Ok(Partials::Fp32));
        assert_eq!(Partials::chosen("", false), Ok(Partials::Fp32));
        assert_eq!(Partials::chosen("tensor", false), Ok(Partials::Tensor));
        assert_eq!(Partials::chosen("", false), Ok(Partials::Fp32));
        let error = Partials::chosen("float", false).expect_err("there is none");
        assert_eq!(error.message, "partials=\"float\" is none of \"tensor\", \"fp32\"");
        assert_eq!(Partials::chosen("", true), Ok(Partials::Tensor));
        assert_eq!(Partials::chosen("", false), Ok(Partials::Tensor));
    }
}
