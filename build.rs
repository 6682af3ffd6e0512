//! Nothing without feature `torch`.

fn main() {}
