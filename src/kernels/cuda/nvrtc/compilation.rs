//! A program inside the compiler.
#![allow(unsafe_code, reason = "functions of NVRTC, found at run time")]

use super::{Handle, Nvrtc};
use crate::error::{Error, Result};
use crate::kernels::cuda::source::Header;
use std::ffi::{CString, c_char, c_int};
use std::ptr::null_mut;

pub(super) fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|error| {
        Error::internal(format!(
            "a kernel's text or option has a zero byte at {}",
            error.nul_position()
        ))
    })
}

/// A program that the compiler holds.
pub(super) struct Compilation<'a> {
    nvrtc: &'a Nvrtc,
    pub(super) handle: Handle,
}

impl<'a> Compilation<'a> {
    pub(super) fn new(
        nvrtc: &'a Nvrtc,
        name: &str,
        text: &str,
        headers: &[Header],
    ) -> Result<Self> {
        let (label, text) = (c_string(name)?, c_string(text)?);
        let texts =
            headers.iter().map(|header| c_string(header.text)).collect::<Result<Vec<_>>>()?;
        let names =
            headers.iter().map(|header| c_string(header.name)).collect::<Result<Vec<_>>>()?;
        let pointers =
            |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (texts_at, names_at) = (pointers(&texts), pointers(&names));
        let mut handle = null_mut();
        // SAFETY: all strings live until the call returns, which copies them; both lists have the
        // given length.
        let status = unsafe {
            let count = headers.len() as c_int;
            (nvrtc.functions.create)(
                &raw mut handle,
                text.as_ptr(),
                label.as_ptr(),
                count,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        nvrtc.check(&format!("take {name}"), status)?;
        Ok(Self { nvrtc, handle })
    }

    /// Returns the bytes that `read` writes; `size` gives their number.
    fn bytes(
        &self,
        what: &str,
        size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        read: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>> {
        let mut length = 0;
        // SAFETY: `handle` is alive; `length` is valid for a write.
        let status = unsafe { size(self.handle, &raw mut length) };
        self.nvrtc.check(&format!("tell the size of {what}"), status)?;
        let mut bytes = vec![0; length];
        // SAFETY: `handle` is alive; `bytes` has the length that `size` has just returned.
        let status = unsafe { read(self.handle, bytes.as_mut_ptr().cast()) };
        self.nvrtc.check(&format!("give {what}"), status)?;
        Ok(bytes)
    }

    pub(super) fn log(&self) -> Result<String> {
        let bytes =
            self.bytes("its messages", self.nvrtc.functions.log_size, self.nvrtc.functions.log)?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
    }

    pub(super) fn cubin(&self) -> Result<Vec<u8>> {
        let bytes = self.bytes(
            "machine code",
            self.nvrtc.functions.cubin_size,
            self.nvrtc.functions.cubin,
        )?;
        if bytes.is_empty() {
            Err(Error::internal(
                "NVRTC gave no machine code: the options named no sm_ architecture",
            ))
        } else {
            Ok(bytes)
        }
    }
}

impl Drop for Compilation<'_> {
    fn drop(&mut self) {
        // SAFETY: `handle` came from `create` and is destroyed only here. This fails only for an
        // invalid handle.
        unsafe { (self.nvrtc.functions.destroy)(&raw mut self.handle) };
    }
}
