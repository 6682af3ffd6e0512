//! A profile: times measured on one kind of hardware, in a JSON file, and where such files are.

use super::curve::Curve;
use super::hardware::{DeviceKind, Hardware};
use super::network::NetworkProfile;
use crate::coll::call::Collective;
use crate::coll::cuda::plan::CudaThresholds;
use crate::coll::plan::CpuThresholds;
use crate::config::{CacheDir, Config, ProfileChoice};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The value of the field `format`.
pub const FORMAT: &str = "torch_symm profile";
/// The only version that exists.
pub const VERSION: u64 = 1;
const MAX_FILE_BYTES: u64 = 4 << 20;
const MAX_RANKS: usize = 128;
/// The directory in the user's cache.
const FOLDER: &str = "profiles";

/// Times on one kind of hardware.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u64,
    /// When and how the profile was made, for human readers.
    pub measured: MeasuredOn,
    /// The hardware for which the profile is valid.
    pub hardware: Hardware,
    /// Measurements by number of ranks in a group.
    pub groups: Vec<GroupTimes>,
    /// Times of a redistribution's steps, if they were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<RedistributeCosts>,
    /// Inter-node measurements, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inter_node: Option<NetworkProfile>,
}

/// When and how a profile was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredOn {
    /// Date and time of the measurement, ISO 8601.
    pub date: String,
    /// Versions of the measured software.
    pub software: String,
    /// The command that made the measurement.
    pub command: String,
    /// Load averages before the measurement.
    pub load: Vec<f64>,
    /// Microseconds of a fixed broadcast, measured together with the times of the profile. A later
    /// calibration recognises the state of the node by this time. 0 on GPUs.
    #[serde(default)]
    pub reference_us: f64,
}

/// Times of groups of one size, while all groups of the job are active.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupTimes {
    /// Number of ranks in each group.
    pub ranks: usize,
    /// Thresholds, written as in `SYMM_CUDA_TUNING`; empty: the defaults.
    #[serde(default)]
    pub cuda_tuning: String,
    /// [`CpuThresholds::stream_bytes`], if a value other than the default was better.
    #[serde(default)]
    pub stream_bytes: Option<u64>,
    /// Curves, one for each collective and algorithm.
    pub curves: Vec<Curve>,
}

/// The cost of the steps of a redistribution, as DTensor runs them, without their collectives.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedistributeCosts {
    /// The host's time for a step with a collective, in microseconds.
    pub step_us: f64,
    /// Microseconds of a step that slices a tensor which every rank has.
    pub slice_us: f64,
    /// Rate at which a rank copies in its own memory while all ranks do so, in GB/s.
    pub copy_gb_per_s: f64,
}

impl Profile {
    /// Parses the profile in `text`.
    ///
    /// # Errors
    /// A message that says what is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Self> {
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(Error::value(format!("it is longer than {MAX_FILE_BYTES} bytes")));
        }
        let faulty = |error: serde_json::Error| Error::value(error.to_string());
        let value: serde_json::Value = serde_json::from_slice(text).map_err(faulty)?;
        if value.get("format").and_then(serde_json::Value::as_str) != Some(FORMAT) {
            return Err(Error::value(format!(
                "it is not a profile: its \"format\" is not {FORMAT:?}"
            )));
        }
        // The version is checked first, because another version may have different fields.
        match value.get("version") {
            Some(version) if version.as_u64() == Some(VERSION) => {}
            Some(version) => {
                return Err(Error::value(format!(
                    "its version is {version}, this torch_symm reads {VERSION}"
                )));
            }
            None => {
                return Err(Error::value(format!(
                    "it has no version; this torch_symm reads {VERSION}"
                )));
            }
        }
        let profile: Self = serde_json::from_value(value).map_err(faulty)?;
        profile.check()?;
        Ok(profile)
    }

    fn check(&self) -> Result<()> {
        let refused = |why: String| Err(Error::value(why));
        let ranks = self.hardware.ranks;
        // A job with one rank per node has no intra-node groups.
        let alone = ranks == 1 && self.inter_node.is_some();
        if !alone && !(2..=MAX_RANKS).contains(&ranks) {
            return refused(format!("a job of {ranks} ranks; from 2 to {MAX_RANKS} are possible"));
        }
        if self.groups.is_empty() && !alone {
            return refused("it has no groups".into());
        }
        self.inter_node
            .as_ref()
            .map_or(Ok(()), NetworkProfile::check)
            .or_else(|error| refused(format!("inter_node: {}", error.message)))?;
        let figures = self.local.iter().flat_map(|local| {
            [
                ("step_us", local.step_us),
                ("slice_us", local.slice_us),
                ("copy_gb_per_s", local.copy_gb_per_s),
            ]
        });
        for (name, value) in figures {
            if !(value > 0.0 && value <= 1e9) {
                return refused(format!(
                    "local: {name} is {value}; it must be above 0 and at most 1000000000"
                ));
            }
        }
        for (index, group) in self.groups.iter().enumerate() {
            if !(2..=ranks).contains(&group.ranks) {
                return refused(format!("a group of {} ranks in a job of {ranks}", group.ranks));
            }
            if self.groups[..index].iter().any(|other| other.ranks == group.ranks) {
                return refused(format!("two entries for groups of {} ranks", group.ranks));
            }
            group.check().or_else(|error| {
                refused(format!("groups of {} ranks: {}", group.ranks, error.message))
            })?;
        }
        Ok(())
    }

    /// Loads the profile in the file at `path`.
    ///
    /// # Errors
    /// [`Config`](crate::error::ErrorKind::Config), with a message that names the file.
    pub fn load(path: &Path) -> Result<Self> {
        let refused = |why: String| Error::config(format!("profile {}: {why}", path.display()));
        // The kind of file is checked before it is opened, because opening a pipe would wait for
        // its writer.
        let kind = std::fs::metadata(path).map_err(|error| refused(error.to_string()))?;
        if !kind.is_file() {
            return Err(refused("it is not a regular file".into()));
        }
        let mut text = Vec::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut text));
        read.map_err(|error| refused(error.to_string()))?;
        Self::parse(&text).map_err(|error| refused(error.message))
    }

    /// Returns the entry for groups of `ranks`.
    pub fn group(&self, ranks: usize) -> Option<&GroupTimes> {
        self.groups.iter().find(|group| group.ranks == ranks)
    }
}

impl GroupTimes {
    fn check(&self) -> Result<()> {
        CudaThresholds::of(self.ranks)
            .overlaid(&self.cuda_tuning)
            .map_err(|why| Error::value(format!("cuda_tuning: {why}")))?;
        if let Some(bytes) = self.stream_bytes.filter(|bytes| !(1..=1 << 50).contains(bytes)) {
            return Err(Error::value(format!(
                "stream_bytes is {bytes}; from 1 to {} are possible",
                1_u64 << 50
            )));
        }
        for (index, curve) in self.curves.iter().enumerate() {
            if Collective::ALL.iter().all(|op| op.name() != curve.op) {
                return Err(Error::value(format!("{:?} is no collective", curve.op)));
            }
            if self.curves[..index]
                .iter()
                .any(|other| (&other.op, &other.algorithm) == (&curve.op, &curve.algorithm))
            {
                return Err(Error::value(format!(
                    "two curves of {} by {}",
                    curve.op, curve.algorithm
                )));
            }
            curve.check()?;
        }
        Ok(())
    }

    /// Returns the thresholds of groups on CPU: the defaults, except for measured values.
    pub fn thresholds(&self) -> CpuThresholds {
        let stream_bytes = self.stream_bytes.and_then(|bytes| usize::try_from(bytes).ok());
        stream_bytes
            .map_or_else(CpuThresholds::default, |stream_bytes| CpuThresholds { stream_bytes })
    }

    /// Returns true if `op` was measured.
    pub(super) fn has(&self, op: Collective) -> bool {
        self.curves.iter().any(|curve| curve.op == op.name())
    }

    /// Returns the microseconds of `op` on `bytes` when `algorithm` runs it: from the curve of that
    /// algorithm or, if the thresholds have changed since the measurement, from the curve that was
    /// measured nearest to this size. `None` if the collective was not measured.
    pub(super) fn us(&self, op: Collective, algorithm: &str, bytes: f64) -> Option<f64> {
        let of_op = || self.curves.iter().filter(|curve| curve.op == op.name());
        let nearest = || of_op().min_by(|a, b| a.distance(bytes).total_cmp(&b.distance(bytes)));
        of_op()
            .find(|curve| curve.algorithm == algorithm)
            .or_else(nearest)
            .map(|curve| curve.at(bytes))
    }
}

/// The directory of the profiles in the package, once Python has set it.
static SHIPPED: OnceLock<PathBuf> = OnceLock::new();

/// Sets the directory of the package's profiles; only the first call has an effect.
pub fn shipped_in(folder: PathBuf) {
    let _ = SHIPPED.set(folder);
}

/// Returns the directory of the user's profiles; `None` without a cache.
pub fn own_folder() -> Option<PathBuf> {
    match &Config::get().cache_dir {
        CacheDir::At(folder) => Some(folder.join(FOLDER)),
        CacheDir::Off | CacheDir::Unknown => None,
    }
}

/// Returns the profile for `hardware` and its file: the one that `SYMM_COST_PROFILE` names,
/// otherwise the user's, otherwise one from the package. `None` if no file exists, or if
/// `SYMM_COST_PROFILE` is 0.
///
/// # Errors
/// The file that `SYMM_COST_PROFILE` names is faulty or is for other hardware. Other files with
/// such an error are skipped with a warning.
pub fn find(hardware: &Hardware) -> Result<Option<(Profile, PathBuf)>> {
    match &Config::get().profile {
        ProfileChoice::Off => return Ok(None),
        ProfileChoice::At(path) => {
            let profile = Profile::load(path)?;
            // A profile of GPUs does not apply to CPU tensors, nor the reverse.
            if profile.hardware.device == hardware.device {
                return accept(profile, path, hardware).map(Some);
            }
        }
        ProfileChoice::Search => {}
    }
    for folder in own_folder().iter().chain(SHIPPED.get()) {
        let path = folder.join(hardware.file_name());
        if !path.exists() {
            continue;
        }
        match Profile::load(&path).and_then(|profile| accept(profile, &path, hardware)) {
            Ok(found) => return Ok(Some(found)),
            Err(error) => log::warn!("{error}; passed over"),
        }
    }
    Ok(None)
}

/// Returns `profile` from the file at `path`, if it was measured on `hardware`.
///
/// # Errors
/// [`Config`](crate::error::ErrorKind::Config), with a message that names both kinds of hardware.
pub fn accept(profile: Profile, path: &Path, hardware: &Hardware) -> Result<(Profile, PathBuf)> {
    if profile.hardware != *hardware {
        return Err(Error::config(format!(
            "profile {} was measured with {}; here there are {hardware}: measure with `python -m \
             torch_symm tune`",
            path.display(),
            profile.hardware
        )));
    }
    Ok((profile, path.into()))
}

/// Returns the profile's entry for groups of `ranks` ranks, for the choice of algorithms.
pub fn settings(device: DeviceKind, ranks: usize) -> Option<GroupTimes> {
    for_choices(device, ranks).and_then(|profile| profile.group(ranks).cloned())
}

/// Returns the inter-node measurements in the profile for a job of `ranks` ranks on this node.
pub fn between_nodes(device: DeviceKind, ranks: usize) -> Option<NetworkProfile> {
    for_choices(device, ranks).and_then(|profile| profile.inter_node)
}

/// Returns the profile with which a group of `ranks` ranks chooses algorithms. A profile of a job
/// with more ranks is also used if `SYMM_COST_PROFILE` names it. A faulty file causes a warning
/// only, because thresholds do not justify failing a group.
fn for_choices(device: DeviceKind, ranks: usize) -> Option<Profile> {
    let named = match &Config::get().profile {
        ProfileChoice::Off => return None,
        ProfileChoice::At(path) => Profile::load(path).ok().map(|profile| profile.hardware),
        ProfileChoice::Search => None,
    };
    let hardware = Hardware::here(device, job_ranks(named.as_ref(), device, ranks))?;
    match find(&hardware) {
        Ok(found) => found.map(|(profile, _)| profile),
        Err(error) => {
            log::warn!("{error}; its thresholds are ignored");
            None
        }
    }
}

/// Returns the size of the job whose profile a group of `ranks` ranks uses: the size in the `named`
/// profile, if that is for `device` and for at least as many ranks, and otherwise `ranks`.
fn job_ranks(named: Option<&Hardware>, device: DeviceKind, ranks: usize) -> usize {
    let fits = |named: &&Hardware| named.device == device && named.ranks >= ranks;
    named.filter(fits).map_or(ranks, |named| named.ranks)
}

#[cfg(test)]
mod tests;
