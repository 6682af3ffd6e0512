//! Collectives: the call ([`call`], [`alias`]), the choice of an algorithm ([`plan`]), its
//! execution ([`cpu`], [`cuda`]), calls on several nodes ([`two_level`]), and their time
//! ([`cost`]).

pub mod alias;
pub mod all_reduce_norm;
pub mod call;
pub mod cost;
pub mod cpu;
pub mod cuda;
pub mod describe;
pub mod message;
pub mod plan;
pub mod two_level;
