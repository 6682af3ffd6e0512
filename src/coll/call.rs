//! One collective call as plain values, and the promise about its memory.
#![allow(unsafe_code, reason = "the constructor by which callers promise memory")]

use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
pub use crate::mem::span::Span;
pub use crate::op::Collective;
use crate::rank::Rank;
use crate::sync::call_site::CallSite;
use std::borrow::Cow;
use std::ops::Deref;

/// The arguments of a collective on one rank. Code that plans, describes or prices a call needs no
/// memory, so it takes this type; code that runs a call takes a [`Call`], which also carries the
/// promise about its memory.
///
/// | op | `inputs` | `outputs` |
/// |---|---|---|
/// | barrier | – | – |
/// | broadcast | root: 1 | others: 1 (root: none) |
/// | all_reduce | 1 | 1 |
/// | reduce | 1 | root: 1 |
/// | all_gather | 1 | n, entry `r` of the length that rank `r` sends |
/// | gather | 1 | root: n, all of the input's length |
/// | scatter | root: n, all of the output's length | 1 |
/// | reduce_scatter | n, entry `r` of the length that rank `r` receives | 1 |
/// | all_to_all | n | n |
/// | all_reduce_add_rms_norm | input, residual, weight; to static fp8: scale | normed, new residual; to dynamic fp8: scales |
///
/// An output may be the very same span as the input that it replaces (in place); any other overlap
/// is undefined.
#[derive(Clone, Debug)]
pub struct CallSpec<'a> {
    /// The collective.
    pub op: Collective,
    /// The type of the elements.
    pub dtype: DType,
    /// The operation that combines elements; ignored unless the collective reduces.
    pub reduce_op: ReduceOp,
    /// The distinguished rank; ignored unless the collective has one.
    pub root: Rank,
    /// Factor of this rank under PREMUL_SUM, eps of a norm; ignored otherwise.
    pub factor: f64,
    /// The memory that this rank sends. Borrowed from the caller until the call has to be queued.
    pub inputs: Cow<'a, [Span]>,
    /// The memory into which this rank receives.
    pub outputs: Cow<'a, [Span]>,
    /// The call site in the user's program, if ranks also compare call sites.
    pub call_site: Option<&'static CallSite>,
    /// The operator of the user whose calls on all ranks this all_gather compares. Errors name it
    /// instead of the all_gather.
    pub compares: Option<Cow<'a, str>>,
}

impl CallSpec<'_> {
    /// Makes a barrier.
    pub const fn barrier(call_site: Option<&'static CallSite>) -> CallSpec<'static> {
        CallSpec {
            op: Collective::Barrier,
            dtype: DType::U8,
            reduce_op: ReduceOp::Sum,
            root: Rank(0),
            factor: 1.0,
            inputs: Cow::Borrowed(&[]),
            outputs: Cow::Borrowed(&[]),
            call_site,
            compares: None,
        }
    }

    /// Returns the same arguments with owned lists.
    pub fn into_owned(self) -> CallSpec<'static> {
        let Self { op, dtype, reduce_op, root, factor, inputs, outputs, call_site, compares } =
            self;
        let compares = compares.map(|operator| Cow::Owned(operator.into_owned()));
        let (inputs, outputs) = (inputs.into_owned().into(), outputs.into_owned().into());
        CallSpec { op, dtype, reduce_op, root, factor, inputs, outputs, call_site, compares }
    }
}

/// A checked call whose memory the caller has promised. It exists so that only its constructor is
/// unsafe: code that runs a call may read the inputs and write the outputs.
///
/// ```
/// use std::borrow::Cow;
/// use symm::coll::call::{Call, CallSpec, Collective, Span};
/// use symm::dtype::DType;
/// use symm::rank::Rank;
///
/// let mut data = [1i32, 2, 3];
/// let span = [Span { addr: data.as_mut_ptr().addr(), bytes: size_of_val(&data) }];
/// let (inputs, outputs) = (Cow::Borrowed(&span[..]), Cow::Borrowed(&span[..]));
/// let op = Collective::AllReduce;
/// let spec = CallSpec { op, dtype: DType::I32, inputs, outputs, ..CallSpec::barrier(None) };
/// // SAFETY: `data` outlives the call, and no other thread uses it meanwhile.
/// let call = unsafe { Call::new(spec, Rank(0), 2) }?;
/// assert_eq!(call.volume(), 12);
/// # Ok::<(), symm::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Call<'a>(CallSpec<'a>);

impl<'a> Call<'a> {
    /// Makes a call of rank `me` of `n`.
    ///
    /// # Safety
    /// The caller promises that, as long as the call or a clone of it exists and until each run of
    /// it has ended, the inputs may be read, the outputs may be written, no other code writes them,
    /// and inputs and outputs overlap only in place. A run ends when `run` returns, when its
    /// completion is called, or when the stream has passed it.
    ///
    /// # Errors
    /// The errors of [`CallSpec::validate`].
    pub unsafe fn new(spec: CallSpec<'a>, me: Rank, n: usize) -> Result<Self> {
        spec.validate(me, n)?;
        Ok(Self(spec))
    }

    /// Makes a call on the crate's own memory, or a part of a call that [`Self::new`] made: the
    /// promise of the caller of `new`, and the checks of `new`, cover the part.
    pub(crate) const fn inner(spec: CallSpec<'a>) -> Self {
        Self(spec)
    }

    /// Makes a barrier. It accesses no memory, so the caller need not promise anything.
    pub const fn barrier(call_site: Option<&'static CallSite>) -> Call<'static> {
        Call(CallSpec::barrier(call_site))
    }

    /// Returns the same call with owned lists, which a queue can keep.
    pub(crate) fn into_owned(self) -> Call<'static> {
        Call(self.0.into_owned())
    }
}

impl<'a> Deref for Call<'a> {
    type Target = CallSpec<'a>;

    fn deref(&self) -> &CallSpec<'a> {
        &self.0
    }
}
