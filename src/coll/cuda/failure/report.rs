//! The report of this rank's kernels: that they timed out, and how many calls were zero-copy.

use crate::coll::cuda::agreement::launch_log;
use crate::coll::cuda::arguments::{DIRECT_WORD, REPORT_WORDS};
use crate::coll::cuda::stats;
use crate::coll::describe::Description;
use crate::control::ControlBlock;
use crate::error::{Error, Result};
use crate::lock::{lock, unpoisoned};
use crate::mem::pinned::PinnedWords;
use crate::rank::Rank;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};

/// Number of launches whose descriptions are kept for messages.
const REMEMBERED: usize = 1024;

/// The report of this rank's kernels. It is separate from the communicator because other code also
/// reads it: the service that frees symmetric memory, and the statistics.
pub(in crate::coll::cuda) struct KernelReport {
    control: Arc<ControlBlock>,
    /// Device address of the words.
    device: u64,
    /// The words of the report; `None` once the communicator, in whose context they are freed, is
    /// released.
    words: RwLock<Option<PinnedWords>>,
    recent: Mutex<VecDeque<(u64, Description)>>,
}

impl KernelReport {
    /// Allocates the report in the current context.
    pub(in crate::coll::cuda) fn new(control: &Arc<ControlBlock>) -> Result<Arc<Self>> {
        let words = PinnedWords::new(REPORT_WORDS)?;
        let (device, words) = (words.device(), RwLock::new(Some(words)));
        let report = Arc::new(Self {
            control: Arc::clone(control),
            device,
            words,
            recent: Mutex::default(),
        });
        stats::add(&report);
        Ok(report)
    }

    /// Returns the device address of the report.
    pub(in crate::coll::cuda) fn device(&self) -> u64 {
        self.device
    }

    fn words(&self) -> RwLockReadGuard<'_, Option<PinnedWords>> {
        unpoisoned(self.words.read())
    }

    /// Keeps the description of a launch for messages.
    pub(in crate::coll::cuda) fn remember(&self, number: u64, description: Description) {
        let mut recent = lock(&self.recent);
        if recent.len() == REMEMBERED {
            recent.pop_front();
        }
        recent.push_back((number, description));
    }

    /// Frees the words in the current context. No kernel uses them any more.
    pub(in crate::coll::cuda) fn retire(&self) {
        stats::retire(self, || drop(unpoisoned(self.words.write()).take()));
    }

    /// Returns why the group has failed, on the host or in a kernel of this rank.
    pub(in crate::coll::cuda) fn failure(&self) -> Option<Error> {
        if let Some(failure) = self.control.failure() {
            return Some(failure);
        }
        let (number, seconds, waited_for) = {
            let words = self.words();
            let words = words.as_ref()?.get();
            if words[0].load(Ordering::Acquire) == 0 {
                return None;
            }
            let word = |i: usize| words[i].load(Ordering::Relaxed);
            let number = u64::from(word(1)) | u64::from(word(2)) << 32;
            let waited_for: Vec<Rank> =
                self.control.peers().filter(|rank| word(4 + rank.index()) != 0).collect();
            (number, f64::from(word(3)) / 1e3, waited_for)
        };
        // If a rank has not launched the call, ranks that have launched it may be unable to send,
        // so name only ranks that have not launched it.
        let late: Vec<Rank> = self
            .control
            .peers()
            .filter(|&rank| launch_log::launched(&self.control, rank) < number)
            .collect();
        let missing = if late.is_empty() { waited_for } else { late };
        let me = self.control.describe(self.control.rank());
        let recent = lock(&self.recent);
        let about = recent
            .iter()
            .find(|(known, _)| *known == number)
            .map(|(_, description)| description.to_string());
        drop(recent);
        let about = about.unwrap_or_else(|| {
            if number == 0 {
                "a send or receive".into()
            } else {
                "a call recorded into a graph".into()
            }
        });
        let doing = |rank| launch_log::progress(&self.control, rank);
        let text = format!(
            "{me} reached its timeout after {seconds:.1} s in {about}, CUDA collective #{number} \
             of group \"{}\", waiting for {}",
            self.control.name(),
            self.control.states_of(&missing, doing)
        );
        Some(self.control.fail(Error::timeout(text)))
    }
}

impl stats::DirectCalls for KernelReport {
    fn direct(&self) -> u64 {
        let words = self.words();
        let counts = words.as_ref().map_or(&[][..], |words| &words.get()[DIRECT_WORD..]);
        counts.iter().map(|count| u64::from(count.load(Ordering::Relaxed))).sum()
    }
}
