//! The directory of dumps. They hold no tensors, but names, sizes and process ids, so only their
//! owner may read them.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::sys::owner_only;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, fstat, open, statat, unlinkat};
use rustix::io::Errno;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum number of dumps in a directory; the oldest are removed.
const MOST: usize = 64;
/// A temporary file that is older than this was left by a killed process.
const STALE_DUMP: Duration = Duration::from_secs(60);

/// Writes `content` as the file `name` of the configured directory, and returns its path.
pub fn keep(name: &str, content: &[u8]) -> Result<PathBuf> {
    let config = Config::get();
    let path = config.trace_dir.clone().unwrap_or_else(|| {
        let user = rustix::process::geteuid().as_raw();
        config.temporary.join(format!("torch-symm-{user}"))
    });
    keep_in(&path, name, content)
}

/// Writes `content` to `path`, whose directory must exist, replacing an existing file.
pub fn write(path: &Path, content: &[u8]) -> Result<()> {
    let refused = || Error::value(format!("{}: no file can have that name", path.display()));
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(refused)?;
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let folder = folder
        .map_err(|errno| Error::value(format!("the folder of {}: {errno}", path.display())))?;
    owner_only::replace(folder.as_fd(), ".trace-", name, content)
        .map_err(|error| Error::value(format!("{}: {error}", path.display())))
}

fn keep_in(path: &Path, name: &str, content: &[u8]) -> Result<PathBuf> {
    let folder = enter(path)?;
    owner_only::replace(folder.as_fd(), ".trace-", name, content)
        .map_err(|error| Error::config(format!("{} in {}: {error}", name, path.display())))?;
    thin_out(&folder, path);
    Ok(path.join(name))
}

/// Opens the directory at `path`, and creates it if necessary. It must belong to the user, and no
/// other user may write to it.
fn enter(path: &Path) -> Result<OwnedFd> {
    let about = |reason: String| Error::config(format!("the folder {} {reason}", path.display()));
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = match (open(path, flags, Mode::empty()), made) {
        (Ok(folder), _) => folder,
        (Err(Errno::NOENT), Err(error)) => return Err(about(format!("cannot be made: {error}"))),
        (Err(Errno::LOOP | Errno::NOTDIR), _) => {
            return Err(about("is a symbolic link or no folder".into()));
        }
        (Err(errno), _) => return Err(about(format!("cannot be opened: {errno}"))),
    };
    let status = fstat(&folder).map_err(|errno| about(format!("cannot be looked at: {errno}")))?;
    owner_only::check_owner(&status).map_err(about)?;
    Ok(folder)
}

/// Removes surplus files. If one cannot be removed, the next dump tries again.
fn thin_out(folder: &OwnedFd, path: &Path) {
    let Ok(entries) = std::fs::read_dir(path) else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut dumps = Vec::new();
    for name in entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        let dump = name.starts_with("trace-") && name.ends_with(".json");
        let part = name.starts_with(".trace-") && name.ends_with(".tmp");
        let Ok(status) = statat(folder, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) else { continue };
        let changed = Duration::new(
            u64::try_from(status.st_mtime).unwrap_or(0),
            u32::try_from(status.st_mtime_nsec).unwrap_or(0),
        );
        if dump {
            dumps.push((changed, name));
        } else if part && now.saturating_sub(changed) > STALE_DUMP {
            let _ = unlinkat(folder, name.as_str(), AtFlags::empty());
        }
    }
    dumps.sort();
    for (_, name) in dumps.iter().rev().skip(MOST) {
        let _ = unlinkat(folder, name.as_str(), AtFlags::empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .expect("a folder")
            .map(|entry| entry.expect("readable").file_name().into_string().expect("text"))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn folder_and_file_are_for_their_owner() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = place.path().join("deep/er");
        let path = keep_in(&folder, "trace-1-rank0.json", b"old").expect("kept");
        assert_eq!(keep_in(&folder, "trace-1-rank0.json", b"new").expect("kept"), path);
        assert_eq!(std::fs::read(&path).expect("a file"), b"new");
        assert_eq!(std::fs::metadata(&path).expect("a file").mode() & 0o7777, 0o600);
        assert_eq!(std::fs::metadata(&folder).expect("a folder").mode() & 0o7777, 0o700);
        assert_eq!(names(&folder), ["trace-1-rank0.json"]);
    }

    #[test]
    fn what_others_may_have_put_there_is_refused() {
        let place = tempfile::tempdir().expect("a folder");
        let (real, link, file) =
            (place.path().join("real"), place.path().join("link"), place.path().join("file"));
        std::fs::create_dir(&real).expect("made");
        symlink(&real, &link).expect("made");
        std::fs::write(&file, "").expect("made");
        for bad in [&link, &file] {
            let error = keep_in(bad, "trace-1-rank0.json", b"x").expect_err("refused");
            error.assert_says(ErrorKind::Config, &["symbolic link or no folder"]);
        }
        std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o777)).expect("set");
        let error = keep_in(&real, "trace-1-rank0.json", b"x").expect_err("refused");
        assert!(error.message.contains("written by others"), "{error}");
        assert_eq!(names(&real).len(), 0);
        // A link in the place of the file is replaced, and its target stays.
        std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o700)).expect("set");
        symlink(&file, real.join("trace-1-rank0.json")).expect("made");
        keep_in(&real, "trace-1-rank0.json", b"x").expect("kept");
        assert_eq!(std::fs::read(&file).expect("a file"), b"");
    }

    #[test]
    fn a_folder_keeps_the_youngest_and_nothing_else_of_ours() {
        let place = tempfile::tempdir().expect("a folder");
        std::fs::write(place.path().join("notes.json"), "the user's").expect("made");
        for age in [0, 3600] {
            let part = std::fs::File::create(place.path().join(format!(".trace-{age}.tmp")))
                .expect("made");
            part.set_modified(SystemTime::now() - Duration::from_secs(age)).expect("set");
        }
        for number in 0..MOST as u64 + 6 {
            let dump =
                std::fs::File::create(place.path().join(format!("trace-{number}-rank0.json")))
                    .expect("made");
            dump.set_modified(SystemTime::now() - Duration::from_secs(1000 - number)).expect("set");
        }
        keep_in(place.path(), "trace-9999-rank0.json", b"x").expect("kept");
        let names = names(place.path());
        assert_eq!(names.iter().filter(|name| name.starts_with("trace-")).count(), MOST);
        assert!(
            names.iter().any(|name| name == "trace-9999-rank0.json")
                && !names.iter().any(|name| name == "trace-6-rank0.json")
        );
        assert!(names.iter().any(|name| name == "trace-7-rank0.json"));
        assert!(
            names.contains(&"notes.json".into())
                && names.contains(&".trace-0.tmp".into())
                && !names.contains(&".trace-3600.tmp".into())
        );
    }

    #[test]
    fn a_path_of_the_users_choice_is_written() {
        let place = tempfile::tempdir().expect("a folder");
        let path = place.path().join("mine.json");
        write(&path, b"x").expect("written");
        assert_eq!(
            (
                std::fs::read(&path).expect("a file"),
                std::fs::metadata(&path).expect("a file").mode() & 0o777
            ),
            (b"x".to_vec(), 0o600)
        );
        assert_eq!(
            write(&place.path().join("none/mine.json"), b"x").expect_err("no folder").kind,
            ErrorKind::Value
        );
        assert_eq!(write(Path::new("/"), b"x").expect_err("no name").kind, ErrorKind::Value);
    }
}
