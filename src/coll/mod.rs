//! Collectives: what was asked ([`call`], [`alias`]), what will run ([`plan`]), how ([`cpu`], [`cuda`]), on several nodes ([`two_level`]),
//! and how long it takes ([`cost`]).

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
