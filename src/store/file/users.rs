//! Users who come and go, one at a time, under the lock; the first one begins a run, the last one removes the file.

use super::disk::Disk;
use super::format::MAGIC;
use super::log::{Entry, Replica, Source};
use super::path::StorePath;
use super::wait::Pauses;
use crate::error::{Error, Result};
use crate::store::deadline;
use crate::sys::lock::Mode;
use crate::sys::random;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time that one who leaves tries to say so.
const LEAVING: Duration = Duration::from_secs(5);

/// State of the file as its first user finds it.
enum Found {
    /// The file has never been in use.
    Nothing,
    /// Content that users who have all left keep for later ones, or that the present ones hold.
    Kept(Box<Replica>),
    /// Leftover of users who were killed, or of whom the last was killed while it removed the file.
    Leftover { joined: u64, left: u64 },
}

/// The file at `path` as one of its users, who has joined before `limit` had passed.
pub(super) fn join(path: &Path, world_size: u32, limit: Option<Duration>) -> Result<(Disk, Replica)> {
    let deadline = deadline(limit);
    let mut pauses = Pauses::new(Duration::from_millis(1));
    loop {
        let store_path = StorePath::new(path)?;
        if let Some(file) = store_path.open()? {
            let disk = Disk::new(file, store_path);
            let held = disk.hold(Mode::Exclusive, deadline)?;
            // The last user may have removed it before the lock was taken: whoever opens it now gets another file.
            if disk.path.holds(&disk.file)? {
                let entered = enter(&disk, world_size);
                drop(held);
                return match entered {
                    Ok(replica) => Ok((disk, replica)),
                    Err(error) => {
                        // Explicitly: a child that was forked meanwhile may have the same open file.
                        let _ = disk.leave();
                        Err(error)
                    }
                };
            }
        }
        if Instant::now() >= deadline {
            return Err(Error::timeout(format!("the file store {path:?} was removed again and again while it was opened")));
        }
        pauses.pause_or_stop(deadline)?;
    }
}

fn enter(disk: &Disk, world_size: u32) -> Result<Replica> {
    let alone = disk.try_alone()?;
    let mut replica = match look(disk, alone, world_size)? {
        Found::Kept(replica) => *replica,
        Found::Nothing => begin(disk)?,
        Found::Leftover { joined, left } => {
            ::log::info!("{} is left over from a run of which {joined} joined and {left} left: started afresh", disk.name());
            disk.empty()?;
            begin(disk)?
        }
    };
    disk.share()?;
    replica.append(&Entry::Join, &mut Vec::new(), &mut |bytes, at| disk.write(bytes, at))?;
    Ok(replica)
}

fn look(disk: &Disk, alone: bool, world_size: u32) -> Result<Found> {
    if alone && is_unused(disk)? {
        return Ok(Found::Nothing);
    }
    let replica = Replica::load(disk)?;
    let (joined, left) = (replica.joined, replica.left);
    if alone && (joined != left || joined >= u64::from(world_size)) {
        return Ok(Found::Leftover { joined, left });
    }
    Ok(Found::Kept(Box::new(replica)))
}

/// Whether nothing, or only part of a front, has ever been written.
fn is_unused(disk: &Disk) -> Result<bool> {
    let mut start = MAGIC;
    let count = disk.read(&mut start, 0)?;
    Ok(start[..count].iter().all(|byte| *byte == 0) && disk.size()? <= super::format::FRONT as u64)
}

fn begin(disk: &Disk) -> Result<Replica> {
    let replica = Replica::fresh(random::bytes()?);
    // The magic last: a front of which a killed process has written a part is not taken for a damaged one.
    let (magic, rest) = replica.front().split_at(MAGIC.len());
    disk.write(rest, MAGIC.len() as u64)?;
    disk.write(magic, 0)?;
    Ok(replica)
}

/// Leaves by best effort: where it fails, this user counts as killed.
pub(super) fn leave(disk: &Disk, replica: &mut Replica, world_size: u32) {
    let outcome = disk.hold(Mode::Exclusive, Instant::now() + LEAVING).and_then(|_held| {
        replica.follow(disk, true)?;
        replica.append(&Entry::Leave, &mut Vec::new(), &mut |bytes, at| disk.write(bytes, at))?;
        if disk.try_alone()? && replica.joined >= u64::from(world_size) && disk.path.holds(&disk.file)? {
            disk.path.remove()?;
        }
        disk.leave()
    });
    if let Err(error) = outcome {
        ::log::warn!("{} was left untidily: {error}", disk.name());
        let _ = disk.leave();
    }
}
