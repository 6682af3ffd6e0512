//! Random splits of all_to_all, all_gather and reduce_scatter, with empty and long messages in one
//! call, compared with a loop.

use crate::threads::{self, call, span, with_ranks};
use proptest::prelude::*;
use symm::coll::call::{Collective, Span};
use symm::dtype::DType;
use symm::error::{Error, ErrorKind};
use symm::group::Group;

/// Number of elements before and after each tensor that must not be written.
const MARGIN: usize = 16;
const CANARY: i32 = -77;

/// Number of elements in the message from each rank to each rank.
type Counts = Vec<Vec<usize>>;

fn counts() -> impl Strategy<Value = Counts> {
    // Counts that fit next to the flag, counts around the limit of 2040 for this, counts that fit
    // into one chunk, and counts that exceed the smallest chunk of five ranks.
    let count = prop_oneof![
        3 => Just(0usize), 4 => 1usize..40, 2 => 400usize..2100, 1 => 2030usize..2050,
        1 => 9000usize..20_000
    ];
    (1usize..=5).prop_flat_map(move |n| {
        prop::collection::vec(prop::collection::vec(count.clone(), n..=n), n..=n)
    })
}

/// Element `i` of the message from `from` to `to`.
fn element(from: usize, to: usize, i: usize) -> i32 {
    (from * 100_003 + to * 1009 + i) as i32
}

fn tensor(from: usize, to: usize, count: usize) -> Vec<i32> {
    (0..count).map(|i| element(from, to, i)).collect()
}

/// Outputs of these lengths, each between canaries.
struct Outputs(Vec<Vec<i32>>);

impl Outputs {
    fn new(counts: impl IntoIterator<Item = usize>) -> Self {
        Self(counts.into_iter().map(|count| vec![CANARY; count + 2 * MARGIN]).collect())
    }

    fn spans(&mut self) -> Vec<Span> {
        let inner = |data: &mut Vec<i32>| {
            let end = data.len() - MARGIN;
            span(&mut data[MARGIN..end])
        };
        self.0.iter_mut().map(inner).collect()
    }

    fn is(&self, index: usize, expected: &[i32]) -> bool {
        let data = &self.0[index];
        let (inner, end) = (&data[MARGIN..data.len() - MARGIN], data.len() - MARGIN);
        inner == expected && data[..MARGIN].iter().chain(&data[end..]).all(|&value| value == CANARY)
    }

    fn untouched(&self) -> bool {
        self.0.iter().flatten().all(|&value| value == CANARY)
    }
}

fn run(
    group: &Group,
    op: Collective,
    inputs: &[Vec<i32>],
    outputs: &mut Outputs,
) -> Result<(), Error> {
    let inputs = inputs
        .iter()
        .map(|data| Span { addr: data.as_ptr() as usize, bytes: 4 * data.len() })
        .collect();
    threads::run(group, call(op, DType::I32, inputs, outputs.spans()), None)
}

/// Asserts that a call fails because lengths differ, that the error contains `parts`, and that the
/// call writes nothing.
fn mismatch(
    group: &Group,
    op: Collective,
    inputs: &[Vec<i32>],
    mut outputs: Outputs,
    parts: &[String],
) {
    let error = run(group, op, inputs, &mut outputs).expect_err("lengths differ");
    assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
    assert!(parts.iter().all(|part| error.message.contains(part)), "{error}");
    assert!(outputs.untouched(), "outputs were written");
}

fn all_to_all(group: &Group, me: usize, counts: &Counts) {
    let n = counts.len();
    let inputs: Vec<_> = (0..n).map(|to| tensor(me, to, counts[me][to])).collect();
    let mut outputs = Outputs::new((0..n).map(|from| counts[from][me]));
    run(group, Collective::AllToAll, &inputs, &mut outputs).expect("all_to_all");
    for (from, row) in counts.iter().enumerate() {
        assert!(outputs.is(from, &tensor(from, me, row[me])), "from {from} to {me}: {counts:?}");
    }
}

fn all_gather(group: &Group, me: usize, counts: &Counts) {
    let mut outputs = Outputs::new(counts.iter().map(|row| row[0]));
    run(group, Collective::AllGather, &[tensor(me, 0, counts[me][0])], &mut outputs)
        .expect("all_gather");
    for (from, row) in counts.iter().enumerate() {
        assert!(outputs.is(from, &tensor(from, 0, row[0])), "from {from} to {me}: {counts:?}");
    }
}

fn reduce_scatter(group: &Group, me: usize, counts: &Counts) {
    let lengths = &counts[0];
    let inputs: Vec<_> =
        lengths.iter().enumerate().map(|(to, &count)| tensor(me, to, count)).collect();
    let mut outputs = Outputs::new([lengths[me]]);
    run(group, Collective::ReduceScatter, &inputs, &mut outputs).expect("reduce_scatter");
    let sum = |i| (0..counts.len()).map(|from| element(from, me, i)).sum();
    let expected: Vec<i32> = (0..lengths[me]).map(sum).collect();
    assert!(outputs.is(0, &expected), "to {me}: {counts:?}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn random_splits_arrive_where_they_belong(first in counts(), seed in any::<u64>()) {
        let n = first.len();
        // The same lengths rotated: calls of different lengths follow each other.
        let second: Counts = (0..n)
            .map(|a| (0..n).map(|b| first[b][(a + seed as usize % n) % n]).collect())
            .collect();
        with_ranks(n as u32, |group, rank| {
            let steps = [all_to_all, all_gather, reduce_scatter];
            for (i, counts) in [&first, &second, &first].into_iter().enumerate() {
                for j in 0..steps.len() {
                    steps[(seed as usize % 3 + i + j) % 3](group, rank as usize, counts);
                }
            }
        });
    }

    // proves P7
    #[test]
    fn one_wrong_length_fails_all_ranks_before_anything_is_written(
        counts in counts().prop_filter("two ranks", |counts| counts.len() > 1),
        pair in any::<[u8; 2]>(), more in 1usize..3000
    ) {
        let n = counts.len();
        let (from, to) = (usize::from(pair[0]) % n, usize::from(pair[1]) % n);
        // The wrong length is not for the rank itself, because `validate` would reject that before
        // peers learn of it.
        let to = if from == to { (to + 1) % n } else { to };
        with_ranks(n as u32, |group, rank| {
            let me = rank as usize;
            let inputs: Vec<_> = (0..n).map(|to| tensor(me, to, counts[me][to])).collect();
            let expected = |other: usize| {
                counts[other][me] + if (other, me) == (from, to) { more } else { 0 }
            };
            let outputs = Outputs::new((0..n).map(expected));
            let (sent, wanted) = (4 * counts[from][to], 4 * (counts[from][to] + more));
            let parts = [format!("sends {sent} bytes"), format!("expects {wanted} bytes")];
            mismatch(group, Collective::AllToAll, &inputs, outputs, &parts);
        });
    }

    // proves P7
    #[test]
    fn one_length_that_a_rank_knows_wrongly_fails_all_ranks_before_anything_is_written(
        counts in counts().prop_filter("two ranks", |counts| counts.len() > 1),
        pair in any::<[u8; 2]>(), more in 1usize..3000, gathers in any::<bool>()
    ) {
        let n = counts.len();
        let (wrong, about) = (usize::from(pair[0]) % n, usize::from(pair[1]) % n);
        let about = if wrong == about { (about + 1) % n } else { about };
        with_ranks(n as u32, |group, rank| {
            let me = rank as usize;
            let lengths: Vec<usize> = (0..n)
                .map(|i| counts[0][i] + if (me, i) == (wrong, about) { more } else { 0 })
                .collect();
            let bytes: Vec<usize> = lengths.iter().map(|count| 4 * count).collect();
            let parts = [format!("with lengths {bytes:?} bytes")];
            if gathers {
                let (inputs, outputs) = ([tensor(me, 0, lengths[me])], Outputs::new(lengths));
                mismatch(group, Collective::AllGather, &inputs, outputs, &parts);
            } else {
                let inputs: Vec<_> = (0..n).map(|to| tensor(me, to, lengths[to])).collect();
                let outputs = Outputs::new([lengths[me]]);
                mismatch(group, Collective::ReduceScatter, &inputs, outputs, &parts);
            }
        });
    }
}
