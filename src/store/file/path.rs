//! The path of the file. Opens the file only if no other user can have put it there.

use crate::error::{Error, Result};
use rustix::fs::{FileType, Stat, fstat, fstatfs, lstat, stat};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// File systems on which all processes of a node see each other's writes at once, by their `statfs`
/// magic numbers: ext2 to ext4, xfs, btrfs, tmpfs, overlayfs, zfs.
const COHERENT: [rustix::fs::FsWord; 6] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630, 0x2fc1_2fc1];

/// The path of a store as given, and the absolute path it had at that time, because the working
/// directory may change.
pub(super) struct StorePath {
    pub(super) given: PathBuf,
    absolute: PathBuf,
}

impl StorePath {
    /// Fails if the directory does not exist or lets all users replace the file.
    pub(super) fn new(path: &Path) -> Result<Self> {
        let refused = |why: String| Error::config(format!("the file store {path:?}: {why}"));
        let absolute = std::path::absolute(path).map_err(|error| refused(error.to_string()))?;
        let folder = absolute.parent().ok_or_else(|| refused("it is no path of a file".into()))?;
        let status = match stat(folder) {
            Ok(status) => status,
            Err(Errno::NOENT) => {
                return Err(refused(format!("its folder {folder:?} does not exist")));
            }
            Err(errno) => return Err(refused(format!("look at its folder {folder:?}: {errno}"))),
        };
        if FileType::from_raw_mode(status.st_mode) != FileType::Directory {
            return Err(refused(format!("{folder:?} is not a folder")));
        }
        if status.st_mode & 0o1002 == 0o002 {
            return Err(refused(format!(
                "its folder {folder:?} has mode {:04o}, so that anybody can exchange what is in \
                 it; a sticky bit would prevent that",
                status.st_mode & 0o7777
            )));
        }
        Ok(Self { given: path.to_owned(), absolute })
    }

    /// Opens the file, and creates it if absent; `None` if it was removed meanwhile.
    pub(super) fn open(&self) -> Result<Option<File>> {
        let flags = libc::O_NOFOLLOW | libc::O_NOCTTY;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
        let file = match options.open(&self.absolute) {
            Ok(file) => file,
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
                return Err(self.refused("it is a symbolic link"));
            }
            Err(error) if error.kind() == ErrorKind::IsADirectory => {
                return Err(self.refused("it is a folder"));
            }
            Err(error) => return Err(self.refused(format_args!("open: {error}"))),
        };
        let status = fstat(&file).map_err(|errno| self.os("look at", errno))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(self.refused("it is not a regular file"));
        }
        let user = rustix::process::geteuid().as_raw();
        if status.st_uid != user {
            return Err(self.refused(format_args!(
                "it belongs to user {}, this process runs as user {user}",
                status.st_uid
            )));
        }
        if status.st_mode & 0o077 != 0 {
            return Err(self.refused(format_args!(
                "it has mode {:04o}; it must be for its owner only, 0600",
                status.st_mode & 0o7777
            )));
        }
        if status.st_nlink > 1 {
            return Err(self.refused(format_args!("it has {} names (hard links)", status.st_nlink)));
        }
        Ok((status.st_nlink == 1).then_some(file))
    }

    /// Returns true if the path still names `file`.
    pub(super) fn holds(&self, file: &File) -> Result<bool> {
        let same =
            |one: &Stat, other: &Stat| (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino);
        let own = fstat(file).map_err(|errno| self.os("look at", errno))?;
        match lstat(&self.absolute) {
            Ok(found) => Ok(own.st_nlink > 0 && same(&found, &own)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(self.os("look at", errno)),
        }
    }

    /// Removes the file that the path names.
    pub(super) fn remove(&self) -> Result<()> {
        rustix::fs::unlink(&self.absolute).map_err(|errno| self.os("remove", errno))
    }

    fn refused(&self, why: impl std::fmt::Display) -> Error {
        Error::config(format!("the file store {:?}: {why}", self.given))
    }

    /// Returns the error of a failed system call on the file.
    pub(super) fn os(&self, what: &str, errno: Errno) -> Error {
        Error::os(&format!("{what} the file store {:?}", self.given), errno)
    }
}

/// Returns true if readers see a completed write to `file` at once. On other file systems, readers
/// see it once they take a lock.
pub(super) fn is_coherent(file: &File) -> bool {
    fstatfs(file).is_ok_and(|status| COHERENT.contains(&status.f_type))
}
