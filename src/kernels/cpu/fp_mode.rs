//! The floating-point mode of the calling thread.
//!
//! `torch.set_flush_denormal(True)` changes the mode of one thread, and a rank that reduces in
//! another mode than its peers would get different bits.
#![allow(
    unsafe_code,
    reason = "loops over the bytes of tensors, whose addresses torch vouches for"
)]

/// The mode that rounds to nearest and keeps subnormals; a drop restores the thread's mode.
pub(super) struct DefaultFpMode {
    own: Option<register::Word>,
}

#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::asm;

    pub(super) type Word = u32;

    /// The bits of MXCSR for flushing to zero, for denormals as zero, and for the rounding mode.
    pub(super) const MODE: Word = 1 << 15 | 1 << 6 | 3 << 13;

    pub(super) fn read() -> Word {
        let mut word = 0;
        // SAFETY: stmxcsr writes four bytes to the address of a local u32.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: Word) {
        // SAFETY: ldmxcsr reads four bytes of a local u32 that differs from the current value in
        // mode bits only.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod register {
    use std::arch::asm;

    pub(super) type Word = u64;

    /// The bits of FPCR for flushing to zero, for flushing float16 to zero, and for the rounding
    /// mode.
    pub(super) const MODE: Word = 1 << 24 | 1 << 19 | 3 << 22;

    pub(super) fn read() -> Word {
        let word;
        // SAFETY: mrs of fpcr changes nothing but the register it writes.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: Word) {
        // SAFETY: `word` differs from the current value in mode bits only.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags)) };
    }
}

/// Other processors keep the thread's mode.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod register {
    pub(super) type Word = u32;

    pub(super) const MODE: Word = 0;

    pub(super) fn read() -> Word {
        0
    }

    pub(super) fn write(_word: Word) {}
}

impl DefaultFpMode {
    /// Sets the default mode, at the cost of a few cycles if it is already set.
    pub(super) fn enter() -> Self {
        let word = register::read();
        let own = (word & register::MODE != 0).then_some(word);
        if own.is_some() {
            register::write(word & !register::MODE);
        }
        Self { own }
    }
}

impl Drop for DefaultFpMode {
    fn drop(&mut self) {
        if let Some(own) = self.own {
            register::write(own);
        }
    }
}

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use super::super::{InputElements, WriteMode, reduce};
    use super::register;
    use crate::dtype::{DType, ReduceOp};

    #[test]
    fn subnormals_survive_a_thread_that_flushes_them() {
        let own = register::read();
        register::write(own | register::MODE);
        let values = [f32::from_bits(1); 3];
        let mut sum = [0f32; 3];
        let source = InputElements { ptr: values.as_ptr().cast(), factor: 1.0 };
        // SAFETY: three f32 in each.
        unsafe {
            reduce(
                ReduceOp::Sum,
                DType::F32,
                sum.as_mut_ptr().cast(),
                &[source, source],
                3,
                WriteMode::Cached,
            )
        };
        let after = register::read();
        register::write(own);
        assert_eq!(sum.map(f32::to_bits), [2; 3]);
        assert_eq!(after & register::MODE, register::MODE, "the thread's mode is its own again");
    }
}
