//! A rank of a group, as its own type.

/// The index of a member within its group, `0 <= rank < size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// Returns the rank as an index into per-member tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl std::fmt::Display for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Formats ranks for error messages: `"rank 1"`, `"ranks 1, 2 and 5"`.
pub fn name_ranks(ranks: &[Rank]) -> String {
    match ranks {
        [] => "no rank".into(),
        [only] => format!("rank {only}"),
        [head @ .., last] => {
            let head: Vec<String> = head.iter().map(Rank::to_string).collect();
            format!("ranks {} and {last}", head.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_read_as_a_sentence() {
        assert_eq!(name_ranks(&[Rank(3)]), "rank 3");
        assert_eq!(name_ranks(&[Rank(0), Rank(2), Rank(3)]), "ranks 0, 2 and 3");
    }
}
