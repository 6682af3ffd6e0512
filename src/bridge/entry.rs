//! The entry point of the extension, and its version.
#![allow(unsafe_code, reason = "the one function that Python looks up by its name")]

// Only `PyInit__C` and the two functions of `memory` are exported; build.rs says how this achieves it.
std::arch::global_asm!(include_str!(concat!(env!("OUT_DIR"), "/hidden.s")));

unsafe extern "C" {
    fn PyInit__C_init() -> *mut std::ffi::c_void;
}

/// Python's entry point. rustc exports only Rust symbols from a cdylib, so this one passes on to the C++ module.
#[unsafe(no_mangle)]
pub(super) extern "C" fn PyInit__C() -> *mut std::ffi::c_void {
    // SAFETY: the module initialiser that PYBIND11_MODULE defines; Python calls this with the GIL held.
    unsafe { PyInit__C_init() }
}

pub(super) fn version() -> String {
    env!("CARGO_PKG_VERSION").into()
}
