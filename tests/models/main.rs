//! Models of the protocols between processes, checked over every order of steps and a death at each: what loom cannot do, because it has
//! no processes that die. Each model names the code that it abstracts; deadlines pass only where nothing else can happen, so a wait that
//! ends by news and one that ends by its deadline are told apart.
#![allow(missing_docs)]
#![allow(clippy::wildcard_enum_match_arm, reason = "a step that a model gains takes part in nothing by itself")]

mod calls;
mod join;
mod leave;

use stateright::{Checker, Model};

/// Checks all properties over all states; returns how many states there are.
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

/// The property of this name fails somewhere: the model is able to see what it is about.
fn finds<M>(model: M, property: &'static str)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + std::fmt::Debug + std::hash::Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + std::fmt::Debug + PartialEq,
{
    let checker = model.checker().threads(2).spawn_bfs().join();
    assert!(checker.discovery(property).is_some(), "nothing violates \"{property}\"");
}
