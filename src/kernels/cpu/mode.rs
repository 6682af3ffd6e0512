//! The floating-point mode of the calling thread.
//!
//! `torch.set_flush_denormal(True)` changes it for one thread; a rank that reduces with another mode than its peers would get other bits.
#![allow(unsafe_code, reason = "loops over the bytes of tensors, whose addresses torch vouches for")]

/// Round to nearest, keep subnormals; the thread's own mode returns on drop.
pub(super) struct DefaultMode {
    #[cfg(target_arch = "x86_64")]
    own: Option<u32>,
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    /// Flush to zero, denormals are zero, rounding control.
    pub(super) const MODE: u32 = 1 << 15 | 1 << 6 | 3 << 13;

    pub(super) fn read() -> u32 {
        let mut word = 0u32;
        // SAFETY: stmxcsr writes four bytes to the address of a local u32.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: u32) {
        // SAFETY: ldmxcsr reads four bytes of a local u32 that differs from the current value in mode bits only.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
    }
}

impl DefaultMode {
    /// Sets the default mode, at the cost of a few cycles where it is set already.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn enter() -> Self {
        let word = x86::read();
        let own = (word & x86::MODE != 0).then_some(word);
        if own.is_some() {
            x86::write(word & !x86::MODE);
        }
        Self { own }
    }

    /// Enters the mode on other processors: whatever the thread has.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn enter() -> Self {
        Self {}
    }
}

impl Drop for DefaultMode {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if let Some(own) = self.own {
            x86::write(own);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::{Source, Store, reduce};
    use super::x86;
    use crate::dtype::{DType, ReduceOp};

    #[test]
    fn subnormals_survive_a_thread_that_flushes_them() {
        let own = x86::read();
        x86::write(own | x86::MODE);
        let values = [f32::from_bits(1); 3];
        let mut sum = [0f32; 3];
        let source = Source { ptr: values.as_ptr().cast(), factor: 1.0 };
        // SAFETY: three f32 in each.
        unsafe { reduce(ReduceOp::Sum, DType::F32, sum.as_mut_ptr().cast(), &[source, source], 3, Store::Cached) };
        let after = x86::read();
        x86::write(own);
        assert_eq!(sum.map(f32::to_bits), [2; 3]);
        assert_eq!(after & x86::MODE, x86::MODE, "the thread's mode is its own again");
    }
}
