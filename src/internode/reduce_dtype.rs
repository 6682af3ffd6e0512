//! The choices of the type and the order of a group's sums.

pub use crate::coll::two_level::levels::ReduceDtype;
use crate::config::{DefaultChoice, named_choice};
use crate::dtype::SumOrder;
use crate::error::Result;

static DEFAULT: DefaultChoice<ReduceDtype> = DefaultChoice::unset();
static DEFAULT_ORDER: DefaultChoice<SumOrder> = DefaultChoice::unset();

/// Returns the order of sums of a group that passes `named`. If `named` is empty, the group
/// inherits the order of the default group. The default group itself, and groups of a process
/// without a default group, then use `setting`.
///
/// # Errors
/// `Value` if `named` is not a valid choice.
pub fn chosen_order(named: &str, setting: SumOrder, is_default: bool) -> Result<SumOrder> {
    let chosen = order_choice(named)?;
    DEFAULT_ORDER.choose(setting, is_default, |usual| Ok(chosen.unwrap_or(usual)))
}

/// Returns the order that an option names, if it names one.
///
/// # Errors
/// `Value` if `named` is not a valid choice.
pub fn order_choice(named: &str) -> Result<Option<SumOrder>> {
    named_choice("order", named, &SumOrder::ALL, SumOrder::name)
}

impl ReduceDtype {
    /// Returns the type of partial sums of a group that passes `named` and sums in `order`. If
    /// `named` is empty, a tree uses [`ReduceDtype::Fp32`], because otherwise the bits of its sums
    /// would differ from the bits on one node; rank order uses the choice of the default group.
    ///
    /// # Errors
    /// `Value` if `named` is not a valid choice.
    pub fn chosen(named: &str, order: SumOrder, is_default: bool) -> Result<Self> {
        let chosen = Self::choice(named)?.or((order == SumOrder::Tree).then_some(Self::Fp32));
        DEFAULT.choose(Self::default(), is_default, |usual| Ok(chosen.unwrap_or(usual)))
    }

    /// Returns the type that an option names, if it names one.
    ///
    /// # Errors
    /// `Value` if `named` is not a valid choice.
    pub fn choice(named: &str) -> Result<Option<Self>> {
        named_choice("reduce_dtype", named, &[Self::Tensor, Self::Fp32], Self::name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_groups_sum_in_the_order_of_the_default_one() {
        assert_eq!(chosen_order("", SumOrder::Tree, true), Ok(SumOrder::Tree));
        assert_eq!(chosen_order("", SumOrder::Rank, false), Ok(SumOrder::Tree));
        assert_eq!(chosen_order("rank", SumOrder::Tree, false), Ok(SumOrder::Rank));
        assert_eq!(chosen_order("rank", SumOrder::Tree, true), Ok(SumOrder::Rank));
        assert_eq!(chosen_order("", SumOrder::Tree, false), Ok(SumOrder::Rank));
        let error = chosen_order("ring", SumOrder::Rank, false).expect_err("there is none");
        assert_eq!(error.message, "order=\"ring\" is not one of \"rank\", \"tree\"");
    }

    #[test]
    fn later_groups_choose_as_the_default_one_did() {
        assert_eq!(ReduceDtype::chosen("float32", SumOrder::Rank, true), Ok(ReduceDtype::Fp32));
        assert_eq!(ReduceDtype::chosen("", SumOrder::Rank, false), Ok(ReduceDtype::Fp32));
        assert_eq!(ReduceDtype::chosen("tensor", SumOrder::Rank, false), Ok(ReduceDtype::Tensor));
        assert_eq!(ReduceDtype::chosen("", SumOrder::Rank, false), Ok(ReduceDtype::Fp32));
        let error = ReduceDtype::chosen("float", SumOrder::Rank, false).expect_err("there is none");
        assert_eq!(error.message, "reduce_dtype=\"float\" is not one of \"tensor\", \"float32\"");
        assert_eq!(ReduceDtype::chosen("", SumOrder::Rank, true), Ok(ReduceDtype::Tensor));
        assert_eq!(ReduceDtype::chosen("", SumOrder::Rank, false), Ok(ReduceDtype::Tensor));
        assert_eq!(ReduceDtype::chosen("", SumOrder::Tree, false), Ok(ReduceDtype::Fp32));
        assert_eq!(ReduceDtype::chosen("tensor", SumOrder::Tree, false), Ok(ReduceDtype::Tensor));
    }
}
