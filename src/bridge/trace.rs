//! The flight recorder, for C++.

use super::ffi::TextResult;
use super::guarded;
use crate::config::Config;
use crate::sync::call_site::CallSite;
use crate::trace::{dump_dir, render};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub(super) fn trace_text() -> TextResult {
    let mut text = String::new();
    let status = guarded(|| {
        text = render()?;
        Ok(())
    });
    TextResult { status, text }
}

pub(super) fn write_trace(path: &[u8], name: &str, content: &[u8]) -> TextResult {
    let mut text = String::new();
    let status = guarded(|| {
        let given = Path::new(OsStr::from_bytes(path));
        let path = if path.is_empty() {
            dump_dir::keep(name, content)?
        } else {
            dump_dir::write(given, content).map(|()| given.into())?
        };
        text = path.to_string_lossy().into_owned();
        Ok(())
    });
    TextResult { status, text }
}

pub(super) fn call_sites_wanted() -> bool {
    let mut wanted = false;
    guarded(|| {
        wanted = Config::get().debug_call_site;
        Ok(())
    });
    wanted
}

pub(super) fn call_site_number(text: &str) -> u32 {
    let mut number = 0;
    guarded(|| {
        number = CallSite::number(text);
        Ok(())
    });
    number
}
