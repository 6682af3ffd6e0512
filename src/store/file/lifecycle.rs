//! Users join and leave one at a time, under the lock; the first one starts a run, and the last one
//! removes the file.

use super::backoff::Backoff;
use super::format::MAGIC;
use super::log::{LogEntry, LogSource, Replica};
use super::log_file::LogFile;
use super::path::StorePath;
use crate::error::{Error, Result};
use crate::store::deadline;
use crate::sys::byte_lock::Mode;
use crate::sys::random;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a leaving user tries to record that it leaves.
const FILE_LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The state of the file as a joining user finds it.
enum FileState {
    /// The file has never been in use.
    Nothing,
    /// The contents that the present users hold, or that earlier users have left for later ones.
    Kept(Box<Replica>),
    /// The rest of a run whose users were killed, or whose last user was killed while it removed
    /// the file.
    Leftover { joined: u64, left: u64 },
}

/// Joins the users of the file at `path`, within `limit`.
pub(super) fn join(
    path: &Path,
    world_size: u32,
    limit: Option<Duration>,
) -> Result<(LogFile, Replica)> {
    let deadline = deadline(limit);
    let mut pauses = Backoff::new(Duration::from_millis(1));
    loop {
        let store_path = StorePath::new(path)?;
        if let Some(file) = store_path.open()? {
            let disk = LogFile::new(file, store_path);
            let held = disk.hold_or_stop(Mode::Exclusive, deadline)?;
            // The last user may have removed the file before this one took the lock; opening the
            // path again then yields a new file.
            if disk.path.holds(&disk.file)? {
                let entered = enter(&disk, world_size);
                drop(held);
                return match entered {
                    Ok(replica) => Ok((disk, replica)),
                    Err(error) => {
                        // Leaves explicitly, because a concurrently forked child may hold the same
                        // open file, and with it the lock.
                        let _ = disk.leave();
                        Err(error)
                    }
                };
            }
        }
        if Instant::now() >= deadline {
            return Err(Error::timeout(format!(
                "the file store {path:?} was removed again and again while it was opened"
            )));
        }
        pauses.pause_or_stop(deadline)?;
    }
}

fn enter(disk: &LogFile, world_size: u32) -> Result<Replica> {
    let alone = disk.try_alone()?;
    let mut replica = match look(disk, alone, world_size)? {
        FileState::Kept(replica) => *replica,
        FileState::Nothing => begin(disk)?,
        FileState::Leftover { joined, left } => {
            ::log::info!(
                "{} is left over from a run of which {joined} joined and {left} \
                 left: started afresh",
                disk.name()
            );
            disk.empty()?;
            begin(disk)?
        }
    };
    disk.share()?;
    replica.append(&LogEntry::Join, &mut Vec::new(), &mut |bytes, at| disk.write(bytes, at))?;
    Ok(replica)
}

fn look(disk: &LogFile, alone: bool, world_size: u32) -> Result<FileState> {
    if alone && is_unused(disk)? {
        return Ok(FileState::Nothing);
    }
    let replica = Replica::load(disk)?;
    let (joined, left) = (replica.joined, replica.left);
    if alone && (joined != left || joined >= u64::from(world_size)) {
        return Ok(FileState::Leftover { joined, left });
    }
    Ok(FileState::Kept(Box::new(replica)))
}

/// Returns true if the file is empty or holds only part of a front.
fn is_unused(disk: &LogFile) -> Result<bool> {
    let mut start = MAGIC;
    let count = disk.read(&mut start, 0)?;
    Ok(start[..count].iter().all(|byte| *byte == 0) && disk.size()? <= super::format::FRONT as u64)
}

fn begin(disk: &LogFile) -> Result<Replica> {
    let replica = Replica::fresh(random::bytes()?);
    // The magic is written last, so that a front that a killed process has written in part does not
    // count as damaged.
    let (magic, rest) = replica.front().split_at(MAGIC.len());
    disk.write(rest, MAGIC.len() as u64)?;
    disk.write(magic, 0)?;
    Ok(replica)
}

/// Leaves if possible; after a failure, this user counts as killed.
pub(super) fn leave(disk: &LogFile, replica: &mut Replica, world_size: u32) {
    let outcome =
        disk.hold(Mode::Exclusive, Instant::now() + FILE_LEAVE_TIMEOUT).and_then(|_held| {
            replica.follow(disk, true)?;
            replica.append(&LogEntry::Leave, &mut Vec::new(), &mut |bytes, at| {
                disk.write(bytes, at)
            })?;
            if disk.try_alone()?
                && replica.joined >= u64::from(world_size)
                && disk.path.holds(&disk.file)?
            {
                disk.path.remove()?;
            }
            disk.leave()
        });
    if let Err(error) = outcome {
        ::log::warn!("{} was left untidily: {error}", disk.name());
        let _ = disk.leave();
    }
}
