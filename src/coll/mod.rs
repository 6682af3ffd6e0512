//! Collectives: what was asked ([`call`]), what will run ([`plan`]), and how ([`cpu`]).

pub mod call;
pub mod cpu;
pub mod cuda;
pub mod describe;
pub mod plan;
