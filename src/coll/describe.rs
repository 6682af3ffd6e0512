//! The description of a call, which ranks compare before they access memory and which messages
//! print.

use crate::coll::all_reduce_norm::Norm;
use crate::coll::call::{CallSpec, Collective, Span};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::rank::Rank;

/// The part of a call on which all ranks must agree, as words that fit next to the arrival flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// From the lowest byte up: op, dtype, reduce op, [`SITED`] and [`COMPARES`], root.
    pub head: u64,
    /// The length on which ranks must agree, see [`CallSpec::agreed_bytes`].
    pub bytes: u64,
    /// [`Norm::word`] of a norm, otherwise 0.
    pub detail: u64,
}

/// Bit of the head which says that the call site is part of the fingerprint.
const SITED: u64 = 1 << 24;
/// Bit of the head which says that the call is an all_gather that compares the calls of an
/// operator, so that it never matches an all_gather of the user.
const COMPARES: u64 = 1 << 25;

impl Description {
    /// Returns the description of `call`, which the ranks compare.
    pub fn of(call: &CallSpec) -> Self {
        let reduce_op = if call.op.reduces() { call.reduce_op as u64 } else { 0 };
        let root = if call.op.rooted() { u64::from(call.root.0) } else { 0 };
        let dtype = if call.op == Collective::Barrier { DType::U8 } else { call.dtype };
        let with_call_site = if call.call_site.is_some() { SITED } else { 0 };
        let compares = if call.compares.is_some() { COMPARES } else { 0 };
        let flags = with_call_site | compares;
        let head = call.op as u64 | (dtype as u64) << 8 | reduce_op << 16 | flags | root << 32;
        Self {
            head,
            bytes: call.agreed_bytes(),
            detail: Norm::of(call).map_or(0, |norm| norm.word()),
        }
    }

    /// Returns a hash of this description of `call`, its agreed lengths and its call site (64-bit
    /// mixing, splitmix64's finaliser).
    pub fn fingerprint(self, call: &CallSpec) -> u64 {
        let mut hash = mix(self.head ^ mix(self.bytes ^ mix(self.detail)));
        for span in call.agreed_lengths() {
            hash = mix(hash ^ span.bytes as u64);
        }
        if let Some(call_site) = call.call_site {
            hash = mix(hash ^ call_site.hash());
        }
        hash
    }

    /// Returns true if the call site is also compared.
    pub fn has_call_site(self) -> bool {
        self.head & SITED != 0
    }

    /// Returns true if the call compares the calls of an operator.
    pub fn compares_operators(self) -> bool {
        self.head & COMPARES != 0
    }

    /// Returns true if the call has lengths on which ranks agree, see
    /// [`CallSpec::agreed_lengths`].
    pub fn has_lengths(self) -> bool {
        matches!(
            Collective::from_code(self.head as u8),
            Some(Collective::AllGather | Collective::ReduceScatter)
        )
    }

    /// Returns the description without the call site.
    pub fn without_call_site(self) -> Self {
        Self { head: self.head & !SITED, ..self }
    }
}

fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl std::fmt::Display for Description {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let byte = |shift: u32| (self.head >> shift) as u8;
        let (Some(op), Ok(dtype), Ok(reduce_op)) = (
            Collective::from_code(byte(0)),
            DType::from_torch(byte(8).into()),
            ReduceOp::from_torch(byte(16)),
        ) else {
            return f.write_str("an unreadable call");
        };
        match op {
            Collective::Barrier => return f.write_str("barrier"),
            // Each pair of ranks may have a different length.
            Collective::AllToAll => return write!(f, "all_to_all({})", dtype.name()),
            Collective::AllReduceAddRmsNorm => {
                return Norm::describe(f, self.bytes, dtype, self.detail);
            }
            Collective::Broadcast
            | Collective::AllReduce
            | Collective::Reduce
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::ReduceScatter => {}
        }
        let count = self.bytes / dtype.size() as u64;
        write!(f, "{}({count} × {}, {} bytes", op.name(), dtype.name(), self.bytes)?;
        if op.reduces() {
            write!(f, ", {}", reduce_op.name())?;
        }
        if op.rooted() {
            write!(f, ", root {}", self.head >> 32)?;
        }
        f.write_str(")")
    }
}

impl CallSpec<'_> {
    /// Returns the length on which all ranks must agree: of one message, or the sum of all messages
    /// if each rank knows all lengths. 0 for a barrier and for an all-to-all.
    pub fn agreed_bytes(&self) -> u64 {
        let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes as u64).sum();
        let one = |spans: &[Span]| spans.first().map_or(0, |span| span.bytes as u64);
        match self.op {
            Collective::Barrier | Collective::AllToAll => 0,
            Collective::AllReduce
            | Collective::Reduce
            | Collective::Gather
            | Collective::AllReduceAddRmsNorm => one(&self.inputs),
            Collective::Broadcast => {
                one(if self.outputs.is_empty() { &self.inputs } else { &self.outputs })
            }
            Collective::Scatter => one(&self.outputs),
            Collective::AllGather => sum(&self.outputs),
            Collective::ReduceScatter => sum(&self.inputs),
        }
    }

    /// Returns one span for each rank, on whose lengths all ranks must agree; empty if the call has
    /// no such lengths.
    pub fn agreed_lengths(&self) -> &[Span] {
        match self.op {
            Collective::AllGather => &self.outputs,
            Collective::ReduceScatter => &self.inputs,
            Collective::Barrier
            | Collective::Broadcast
            | Collective::AllReduce
            | Collective::Reduce
            | Collective::Gather
            | Collective::Scatter => &[],
            Collective::AllToAll | Collective::AllReduceAddRmsNorm => &[],
        }
    }

    /// Returns the inputs that other ranks need. A norm's residual, weight and scale are the same
    /// on all ranks and are left out.
    pub fn shared_inputs(&self) -> &[Span] {
        let count = if self.op == Collective::AllReduceAddRmsNorm { 1 } else { self.inputs.len() };
        &self.inputs[..count.min(self.inputs.len())]
    }

    /// Returns the length of the longest message between two ranks that this rank knows.
    pub fn longest(&self) -> usize {
        self.shared_inputs().iter().chain(&*self.outputs).map(|span| span.bytes).max().unwrap_or(0)
    }

    /// Returns the total size of this rank's shared inputs and of its outputs in bytes.
    pub fn total(&self) -> usize {
        self.shared_inputs().iter().chain(&*self.outputs).map(|span| span.bytes).sum()
    }

    /// Returns the number of bytes that this rank gives or receives, whichever is larger.
    pub fn volume(&self) -> usize {
        let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
        sum(&self.inputs).max(sum(&self.outputs))
    }

    /// Returns the number of inputs and of outputs that the collective requires of rank `me` of
    /// `n`.
    pub fn num_spans(&self, me: Rank, n: usize) -> (usize, usize) {
        let at_root = |count| if me == self.root { count } else { 0 };
        match self.op {
            Collective::Barrier => (0, 0),
            Collective::Broadcast => (at_root(1), 1 - at_root(1)),
            Collective::AllReduce => (1, 1),
            Collective::Reduce => (1, at_root(1)),
            Collective::AllGather => (1, n),
            Collective::Gather => (1, at_root(n)),
            Collective::Scatter => (at_root(n), 1),
            Collective::ReduceScatter => (n, 1),
            Collective::AllToAll => (n, n),
            Collective::AllReduceAddRmsNorm => Norm::spans(self),
        }
    }

    /// Checks that the spans have the number and lengths that the collective requires of rank `me`
    /// of `n`, and that the elements can be reduced. Afterwards neither an end of a span nor a sum
    /// of lengths can wrap.
    pub fn validate(&self, me: Rank, n: usize) -> Result<()> {
        if self.op.reduces() {
            crate::kernels::cpu::supports(self.reduce_op, self.dtype)?;
        }
        let root = me == self.root;
        let (inputs, outputs) = self.num_spans(me, n);
        let name = self.op.name();
        if self.op.rooted() && self.root.index() >= n {
            return Err(Error::value(format!(
                "{name}: root {} is outside the group of {n} ranks",
                self.root
            )));
        }
        if (self.inputs.len(), self.outputs.len()) != (inputs, outputs) {
            let (i, o) = (self.inputs.len(), self.outputs.len());
            return Err(Error::value(format!(
                "{name} takes {inputs} inputs and {outputs} outputs here, not {i} and {o}"
            )));
        }
        for spans in [&self.inputs, &self.outputs] {
            let total = spans.iter().try_fold(0usize, |sum, span| sum.checked_add(span.bytes));
            if total.is_none_or(|total| total > isize::MAX as usize)
                || spans.iter().any(|span| span.addr.checked_add(span.bytes).is_none())
            {
                let lengths: Vec<usize> = spans.iter().map(|span| span.bytes).collect();
                return Err(Error::value(format!(
                    "{name}: {lengths:?} bytes in total exceed the available memory"
                )));
            }
        }
        let own = |spans: &[Span]| {
            spans.get(if spans.len() == n { me.index() } else { 0 }).map_or(0, |span| span.bytes)
        };
        let even = |spans: &[Span]| spans.windows(2).all(|pair| pair[0].bytes == pair[1].bytes);
        let fits = match self.op {
            Collective::Barrier | Collective::Broadcast => true,
            Collective::AllReduceAddRmsNorm => return Norm::validate(self),
            Collective::AllReduce
            | Collective::AllGather
            | Collective::ReduceScatter
            | Collective::AllToAll => own(&self.inputs) == own(&self.outputs),
            Collective::Reduce => !root || own(&self.inputs) == own(&self.outputs),
            Collective::Gather => {
                even(&self.outputs) && (!root || own(&self.inputs) == own(&self.outputs))
            }
            Collective::Scatter => {
                even(&self.inputs) && (!root || own(&self.inputs) == own(&self.outputs))
            }
        };
        let whole = |span: &Span| span.bytes.is_multiple_of(self.dtype.size());
        if fits && self.inputs.iter().chain(&*self.outputs).all(whole) {
            return Ok(());
        }
        let lengths = |spans: &[Span]| spans.iter().map(|span| span.bytes).collect::<Vec<_>>();
        Err(Error::value(format!(
            "{name}: the lengths of inputs {:?} and outputs {:?} (bytes, rank {me} of {n}, {}) do \
             not fit each other",
            lengths(&self.inputs),
            lengths(&self.outputs),
            self.dtype.name()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::call_site::CallSite;

    fn call(op: Collective, root: u32, inputs: &[usize], outputs: &[usize]) -> CallSpec<'static> {
        let spans =
            |lengths: &[usize]| lengths.iter().map(|&bytes| Span { addr: 0, bytes }).collect();
        let (inputs, outputs) = (spans(inputs), spans(outputs));
        let (dtype, root) = (DType::F32, Rank(root));
        CallSpec { op, dtype, root, inputs, outputs, ..CallSpec::barrier(None) }
    }

    #[test]
    fn descriptions_read_as_calls() {
        for (call, text) in [
            (
                call(Collective::AllReduce, 0, &[4096], &[4096]),
                "all_reduce(1024 × float32, 4096 bytes, SUM)",
            ),
            (call(Collective::Broadcast, 2, &[], &[8]), "broadcast(2 × float32, 8 bytes, root 2)"),
            (call(Collective::Barrier, 0, &[], &[]), "barrier"),
            (call(Collective::AllToAll, 0, &[4, 8], &[4, 8]), "all_to_all(float32)"),
        ] {
            assert_eq!(Description::of(&call).to_string(), text);
        }
    }

    // proves P7
    #[test]
    fn fingerprints_tell_calls_apart() {
        let print = |call: &CallSpec| Description::of(call).fingerprint(call);
        let base = call(Collective::AllGather, 0, &[4], &[4, 8]);
        assert_eq!(
            print(&base),
            print(&call(Collective::AllGather, 1, &[8], &[4, 8])),
            "unused root, other rank's input"
        );
        assert_ne!(
            print(&base),
            print(&call(Collective::AllGather, 0, &[8], &[8, 4])),
            "other lengths"
        );
        assert_ne!(print(&base), print(&CallSpec { dtype: DType::I32, ..base.clone() }));
        assert_ne!(print(&base), print(&CallSpec { compares: Some("f()".into()), ..base.clone() }));
        assert_ne!(
            print(&call(Collective::Reduce, 0, &[4], &[4])),
            print(&call(Collective::Reduce, 1, &[4], &[])),
            "other root"
        );
    }

    #[test]
    fn fingerprints_tell_sites_apart() {
        let at = |text: &str| CallSpec {
            call_site: CallSite::known(CallSite::number(text)),
            ..call(Collective::AllReduce, 0, &[4], &[4])
        };
        let print = |call: &CallSpec| Description::of(call).fingerprint(call);
        let plain = call(Collective::AllReduce, 0, &[4], &[4]);
        assert_eq!(print(&at("a.py:1")), print(&at("a.py:1")));
        assert_ne!(print(&at("a.py:1")), print(&at("a.py:2")));
        assert_ne!(print(&at("a.py:1")), print(&plain));
        let with_call_site = Description::of(&at("a.py:1"));
        assert!(with_call_site.has_call_site() && with_call_site != Description::of(&plain));
        assert_eq!(with_call_site.without_call_site(), Description::of(&plain));
        assert_eq!(with_call_site.to_string(), Description::of(&plain).to_string());
    }

    #[test]
    fn spans_that_do_not_fit_are_refused() {
        for (what, fits, call) in [
            ("equal lengths", true, call(Collective::AllReduce, 0, &[8], &[8])),
            ("a shorter output", false, call(Collective::AllReduce, 0, &[8], &[4])),
            ("half an element", false, call(Collective::AllReduce, 0, &[6], &[6])),
            ("root outside", false, call(Collective::Broadcast, 2, &[], &[4])),
            ("uneven gather", false, call(Collective::Gather, 0, &[4], &[4, 8])),
            ("not the root", true, call(Collective::Scatter, 1, &[], &[4])),
        ] {
            assert_eq!(call.validate(Rank(0), 2).is_ok(), fits, "{what}");
        }
    }

    #[test]
    fn lengths_whose_sum_wraps_are_refused() {
        let huge = usize::MAX / 4 / 4 * 4;
        let lengths = [huge, huge, huge, huge, 20];
        for (inputs, outputs) in [(&lengths, &[4; 5]), (&[4; 5], &lengths)] {
            let error = call(Collective::AllToAll, 0, inputs, outputs)
                .validate(Rank(0), 5)
                .expect_err("they wrap");
            assert!(error.message.contains("exceed the available memory"), "{error}");
        }
        let beyond = Span { addr: usize::MAX - 3, bytes: 8 };
        let call =
            CallSpec { outputs: vec![beyond].into(), ..call(Collective::Broadcast, 1, &[], &[8]) };
        assert!(call.validate(Rank(0), 2).is_err(), "an end that wraps");
    }
}
