//! Splits of an all-to-all. Peers' splits decide where a rank reads and writes, so they are checked
//! like any input.

use crate::error::{Error, Result};
use crate::rank::Rank;

/// The operator's name in errors.
const OP: &str = "all_to_all_vdev";

/// Rows from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SplitRows {
    /// Number of rows.
    pub(super) count: usize,
    /// Index of the first row in the sender's input.
    pub(super) sent_from: usize,
    /// Index of the first row in the receiver's output.
    pub(super) received_at: usize,
}

/// The number of rows that each of `n` ranks sends to each rank: entry `from * n + to`, as the
/// sender wrote it.
pub(super) struct Splits {
    pub(super) n: usize,
    pub(super) counts: Vec<i64>,
}

impl Splits {
    /// Returns the start and count of the rows that rank `from` sends to each rank; an input has
    /// `rows` rows.
    fn sent(&self, from: usize, rows: usize) -> Result<Vec<(usize, usize)>> {
        let mut begin = 0;
        let counts = self.counts[from * self.n..][..self.n].iter().enumerate();
        let checked = counts.map(|(to, &count)| {
            let known = usize::try_from(count).ok().filter(|&count| count <= rows - begin);
            let count = known.ok_or_else(|| {
                Error::value(format!(
                    "{OP}: rank {from} sends rank {to} {count} rows from row {begin} on, of {rows}"
                ))
            })?;
            begin += count;
            Ok((begin - count, count))
        });
        checked.collect()
    }

    /// Returns the rows that `me` receives from each rank. Fails with the same error on all ranks
    /// if splits exceed the `rows` rows of an input, and on this rank only if they exceed the
    /// `room` rows of its output.
    pub(super) fn received(&self, me: Rank, rows: usize, room: usize) -> Result<Vec<SplitRows>> {
        let sent: Vec<_> = (0..self.n).map(|from| self.sent(from, rows)).collect::<Result<_>>()?;
        let mut begin = 0;
        let checked = sent.iter().enumerate().map(|(from, sent)| {
            let (sent_from, count) = sent[me.index()];
            if count > room - begin {
                return Err(Error::value(format!(
                    "{OP}: rank {me} receives {begin} rows from the ranks before rank {from} and \
                     {count} from it, out has {room}"
                )));
            }
            begin += count;
            Ok(SplitRows { count, sent_from, received_at: begin - count })
        });
        checked.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received<const N: usize>(
        counts: [[i64; N]; N],
        me: u32,
        rows: usize,
        room: usize,
    ) -> Result<Vec<[usize; 3]>> {
        let splits = Splits { n: N, counts: counts.concat() };
        let found = splits.received(Rank(me), rows, room)?;
        Ok(found.iter().map(|rows| [rows.count, rows.sent_from, rows.received_at]).collect())
    }

    #[test]
    fn rows_follow_each_other_on_both_sides() {
        let counts = [[1, 2, 3], [0, 5, 1], [7, 0, 0]];
        assert_eq!(received(counts, 0, 7, 8), Ok(vec![[1, 0, 0], [0, 0, 1], [7, 0, 1]]));
        assert_eq!(received(counts, 1, 7, 8), Ok(vec![[2, 1, 0], [5, 0, 2], [0, 7, 7]]));
        assert_eq!(received(counts, 2, 7, 4), Ok(vec![[3, 3, 0], [1, 5, 3], [0, 7, 4]]));
        assert_eq!(received([[3]], 0, 3, 3), Ok(vec![[3, 0, 0]]));
    }

    #[test]
    fn nothing_may_be_sent_by_all_or_by_some() {
        assert_eq!(received([[0, 0], [0, 0]], 1, 0, 0), Ok(vec![[0, 0, 0], [0, 0, 0]]));
        assert_eq!(received([[0, 4], [0, 0]], 1, 4, 4), Ok(vec![[4, 0, 0], [0, 0, 4]]));
        assert_eq!(received([[0, 4], [0, 0]], 0, 4, 0), Ok(vec![[0, 0, 0], [0, 0, 0]]));
    }

    #[test]
    fn rows_that_are_not_there_are_refused_alike_on_all_ranks() {
        for (bad, to, begin) in [
            ([9, 0], 0, 0),
            ([-1, 1], 0, 0),
            ([4, 1 << 62], 1, 4),
            ([4, 5], 1, 4),
            ([i64::MAX, 1], 0, 0),
            ([1, i64::MAX], 1, 1),
            ([i64::MIN, i64::MAX], 0, 0),
        ] {
            let errors = [0, 1]
                .map(|me| received([[4, 4], bad], me, 8, 100).expect_err("more than there are"));
            let text = format!(
                "all_to_all_vdev: rank 1 sends rank {to} {} rows from row {begin} on, of 8",
                bad[to]
            );
            assert!(errors.iter().all(|error| error.message == text), "{errors:?}");
        }
    }

    #[test]
    fn rows_for_which_there_is_no_room_are_refused_where_that_is() {
        let counts = [[4, 4], [4, 4]];
        let error = received(counts, 0, 8, 7).expect_err("one too many");
        let text = "all_to_all_vdev: rank 0 receives 4 rows from the ranks before rank 1 and 4 \
            from it, out has 7";
        assert_eq!(error.message, text);
        assert!(received(counts, 1, 8, 8).is_ok());
    }
}
