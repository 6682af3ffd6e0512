//! The flight recorder, for C++.

use super::ffi::TopologyReport;
use super::guarded;
use crate::config::Config;
use crate::sync::call_site::CallSite;
use crate::trace::{folder, render};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub(super) fn trace_text() -> TopologyReport {
    let mut text = String::new();
    let status = guarded(|| {
        text = render()?;
        Ok(())
    });
    TopologyReport { status, text }
}

pub(super) fn keep_trace(path: &[u8], name: &str, content: &[u8]) -> TopologyReport {
    let mut text = String::new();
    let status = guarded(|| {
        let given = Path::new(OsStr::from_bytes(path));
        let path = if path.is_empty() { folder::keep(name, content)? } else { folder::write(given, content).map(|()| given.into())? };
        text = path.to_string_lossy().into_owned();
        Ok(())
    });
    TopologyReport { status, text }
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
