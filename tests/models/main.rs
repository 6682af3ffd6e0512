//! Models of the protocols between processes, checked over every order of steps with an exit at
//! each step. loom cannot do this, because it has no processes that exit. Each model names the code
//! that it abstracts. Deadlines expire only when no other step is possible, so a wait that ends by
//! a report differs from one that ends by its deadline.
#![allow(missing_docs)]
#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "a step that a model gains takes part in nothing by itself"
)]

mod calls;
mod join;
mod leave;

use stateright::{Checker, Model};

/// Checks all properties over all states; returns the number of states.
fn check<M>(model: M) -> usize
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + std::fmt::Debug + std::hash::Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + std::fmt::Debug + PartialEq,
{
    let checker = model.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    checker.unique_state_count()
}

/// Checks that the property with this name fails in some state, so the model can detect a
/// violation.
fn finds<M>(model: M, property: &'static str)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + std::fmt::Debug + std::hash::Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + std::fmt::Debug + PartialEq,
{
    let checker = model.checker().threads(2).spawn_bfs().join();
    assert!(checker.discovery(property).is_some(), "nothing violates \"{property}\"");
}
