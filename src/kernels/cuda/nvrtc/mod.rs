//! NVIDIA's run-time compiler, opened at run time: the build does not need it, and neither does a
//! node without GPUs.
//!
//! It is not opened through cudarc, which searches only for the library names of one toolkit.
#![allow(unsafe_code, reason = "functions of NVRTC, found at run time")]

mod compilation;
mod find;

use super::source::Header;
use crate::error::{Error, Result};
use compilation::{Compilation, c_string};
pub use find::{nvrtc, search_in};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// `NVRTC_SUCCESS`.
const SUCCESS: c_int = 0;
/// `NVRTC_ERROR_INVALID_OPTION`.
const INVALID_OPTION: c_int = 5;
/// `NVRTC_ERROR_BUILTIN_OPERATION_FAILURE`.
const NO_BUILTINS: c_int = 7;

/// Maximum number of lines of the compiler's messages in an error.
const LOG_LINES: usize = 12;

/// `nvrtcProgram`.
type Handle = *mut c_void;

macro_rules! functions {
    ($($name:ident = $symbol:literal: ($($argument:ty),*) -> $result:ty;)*) => {
        /// Valid while the library is open.
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) -> $result),* }

        impl Functions {
            fn of(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the types match nvrtc.h, and are the same from CUDA 11.1 to 13.
                unsafe {
                    Ok(Self { $(
                        $name: *library
                            .get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol)?
                    ),* })
                }
            }
        }
    };
}

functions! {
    version = "nvrtcVersion": (*mut c_int, *mut c_int) -> c_int;
    error_string = "nvrtcGetErrorString": (c_int) -> *const c_char;
    create = "nvrtcCreateProgram": (
        *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char,
        *const *const c_char
    ) -> c_int;
    destroy = "nvrtcDestroyProgram": (*mut Handle) -> c_int;
    compile = "nvrtcCompileProgram": (Handle, c_int, *const *const c_char) -> c_int;
    cubin_size = "nvrtcGetCUBINSize": (Handle, *mut usize) -> c_int;
    cubin = "nvrtcGetCUBIN": (Handle, *mut c_char) -> c_int;
    log_size = "nvrtcGetProgramLogSize": (Handle, *mut usize) -> c_int;
    log = "nvrtcGetProgramLog": (Handle, *mut c_char) -> c_int;
}

/// The opened compiler. Several threads may use it at once.
pub struct Nvrtc {
    functions: Functions,
    /// Major and minor version.
    version: (i32, i32),
    path: PathBuf,
    /// The library that the compiler opens by its bare name while it compiles; held open so that
    /// the compiler finds it.
    _builtins: Option<Library>,
    /// The library that contains `functions`; declared after them, so that it is dropped last.
    _library: Library,
}

/// The result of a compilation.
pub struct Compiled {
    /// Machine code for one architecture.
    pub cubin: Vec<u8>,
    /// Messages of the compiler: warnings, and output that the options request.
    pub log: String,
}

impl Nvrtc {
    /// Opens the library with this name or path; `flags` of `dlopen` are added to `RTLD_NOW` and
    /// `RTLD_LOCAL`.
    fn open(name: &OsStr, flags: c_int) -> Result<Self> {
        let fail = |error: libloading::Error| {
            // The linker's message is the source of libloading's error.
            let reason = std::error::Error::source(&error)
                .map_or_else(|| error.to_string(), ToString::to_string);
            Error::config(format!("NVRTC cannot be opened as {}: {reason}", name.display()))
        };
        // SAFETY: loading NVIDIA's library has no effect that other code could notice.
        let library =
            unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | flags) }.map_err(fail)?;
        let functions = Functions::of(&library).map_err(fail)?;
        let path = origin(functions.version as *const c_void).unwrap_or_else(|| name.into());
        let mut version = (0, 0);
        // SAFETY: the library is open, and both pointers are valid for a write.
        let status = unsafe { (functions.version)(&raw mut version.0, &raw mut version.1) };
        if status != SUCCESS {
            return Err(Error::config(format!(
                "NVRTC at {} does not tell its version: error {status}",
                path.display()
            )));
        }
        // The compiler searches for the library of its built-in functions in the linker's paths,
        // not in its own directory. It also finds that library if it is already open.
        let builtins =
            path.with_file_name(format!("libnvrtc-builtins.so.{}.{}", version.0, version.1));
        // SAFETY: as above; the file is a table.
        let builtins = unsafe { Library::open(Some(builtins), RTLD_NOW | RTLD_LOCAL) }.ok();
        Ok(Self { functions, version, path, _builtins: builtins, _library: library })
    }

    /// Returns the major and minor version, which equals the CUDA toolkit's.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Returns the library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Compiles `text`, which messages call `name`, to machine code. `options` must name an
    /// architecture as `sm_90`.
    ///
    /// Fails with `Config` if this NVRTC does not support the options or lacks its built-in
    /// functions, and with `Internal` and the compiler's first messages if the program is wrong.
    pub fn compile(
        &self,
        name: &str,
        text: &str,
        headers: &[Header],
        options: &[String],
    ) -> Result<Compiled> {
        let program = Compilation::new(self, name, text, headers)?;
        let owned = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<_> = owned.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive; `pointers` are strings of `owned`, and their number is
        // passed.
        let status = unsafe {
            (self.functions.compile)(program.handle, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = program.log().unwrap_or_default();
        if status == SUCCESS {
            return Ok(Compiled { cubin: program.cubin()?, log });
        }
        let lines: Vec<&str> = log
            .lines()
            .map(str::trim_end)
            .filter(|line| !line.is_empty())
            .take(LOG_LINES)
            .collect();
        let message = format!(
            "{}, with {}: {}",
            self.failed(&format!("compile {name}"), status),
            options.join(" "),
            lines.join("\n")
        );
        Err(match status {
            INVALID_OPTION | NO_BUILTINS => Error::config(message),
            _ => Error::internal(message),
        })
    }

    /// Returns the message for a failed call.
    fn failed(&self, what: &str, status: c_int) -> String {
        // SAFETY: returns a constant of the library for any number.
        let reason =
            unsafe { CStr::from_ptr((self.functions.error_string)(status)) }.to_string_lossy();
        format!(
            "NVRTC {}.{} at {} did not {what}: {reason}",
            self.version.0,
            self.version.1,
            self.path.display()
        )
    }

    fn check(&self, what: &str, status: c_int) -> Result<()> {
        if status == SUCCESS { Ok(()) } else { Err(Error::internal(self.failed(what, status))) }
    }
}

/// Returns the file from which `symbol` was loaded.
fn origin(symbol: *const c_void) -> Option<PathBuf> {
    // SAFETY: all zeroes is a valid value of this structure of pointers.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `dladdr` accepts any address; `found` is valid for a write.
    if unsafe { libc::dladdr(symbol, &raw mut found) } == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the linker's own string, which lives while the library is open; the caller holds it.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(OsStr::from_bytes(name.to_bytes()).into())
}

#[cfg(test)]
mod tests;
