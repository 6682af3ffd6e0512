//! Configuration from the environment. The only reader of `std::env`; each process reads it once
//! and logs it once at INFO.

mod default_choice;

use crate::cta::{CtaOptions, CtaPolicy};
use crate::dtype::SumOrder;
use crate::sys::fork::PerProcess;
use crate::sys::logging;
pub use default_choice::{DefaultChoice, named_choice};
use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The directory for compiled kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheDir {
    /// Disabled by the user.
    Off,
    /// The environment does not name a directory of the user.
    Unknown,
    /// The directory at this path, which need not exist yet.
    At(PathBuf),
}

/// The profile of measured times to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProfileChoice {
    /// Disabled by the user.
    Off,
    /// The profile for this hardware, from the user's cache or the package.
    Search,
    /// The profile in this file.
    At(PathBuf),
}

/// How the nodes of a group are connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InterNodeChoice {
    /// Not at all: a multi-node group is rejected.
    None,
    /// By backends of torch.
    Backends(InterNodeBackends),
}

/// Names of the torch backends that connect nodes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InterNodeBackends {
    /// The backend for CPU tensors.
    pub cpu: String,
    /// The backend for CUDA tensors; empty rejects them.
    pub cuda: String,
}

impl fmt::Display for InterNodeBackends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cpu:{}", self.cpu)?;
        if self.cuda.is_empty() { Ok(()) } else { write!(f, ",cuda:{}", self.cuda) }
    }
}

impl InterNodeChoice {
    /// Returns the choice for one of the names `none`, `gloo`, `nccl` and `auto`; `None` for any
    /// other. `nccl` and `auto` use Gloo for CPU tensors.
    pub fn named(name: &str) -> Option<Self> {
        let backends = |cuda: &str| {
            Some(Self::Backends(InterNodeBackends { cpu: "gloo".into(), cuda: cuda.into() }))
        };
        match name {
            "none" => Some(Self::None),
            "gloo" => backends(""),
            "nccl" | "auto" => backends("nccl"),
            _ => None,
        }
    }
}

/// The settings of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `SYMM_LOG`: `off`, `error`, `warn` (the default), `info`, `debug` or `trace`, or an
    /// `env_logger` filter.
    pub log: String,
    /// `TORCHELASTIC_RESTART_COUNT`: separates the store keys of a job's attempts. Default `"0"`.
    pub restart: String,
    /// `SYMM_SPIN`: spin iterations of a waiting thread before it yields its core; absent: chosen
    /// from the number of cores.
    pub spin: Option<u32>,
    /// `SYMM_CPU_THREADS`: threads of a rank that copy and reduce long CPU calls; absent: cores per
    /// rank, at most 4.
    pub cpu_threads: Option<usize>,
    /// `SYMM_CMA`: `0` forbids reading peers' memory with `process_vm_readv`. Default on.
    pub cma: bool,
    /// `SYMM_WORKSPACE_MB`: MiB of GPU memory for each of a process's first groups; later ones get
    /// less. Default 512.
    pub workspace_mb: usize,
    /// `SYMM_P2P`: `0` prevents GPUs from mapping each other's memory; they use host memory
    /// instead. Default on.
    pub p2p: bool,
    /// `CUDA_DEVICE_MAX_CONNECTIONS`, of CUDA, is 1: all streams of a GPU share one hardware queue.
    /// Default off.
    pub one_gpu_queue: bool,
    /// `SYMM_ALLOW_SHARED_GPUS`: `1` lets ranks share a GPU, for tests; their kernels take turns of
    /// some ms. Default off.
    pub shared_gpus: bool,
    /// `SYMM_CUDA_TUNING`: thresholds between algorithms (`coll::cuda::tuning`), the same on all
    /// ranks.
    pub cuda_tuning: String,
    /// `SYMM_COST_PROFILE`: a file of `python -m torch_symm tune`, or `0` to disable; absent:
    /// searched for (`docs/design/cost-model.md`).
    pub profile: ProfileChoice,
    /// `SYMM_STORE_MAX_BYTES`: maximum size of a store server's contents in bytes; absent: 256 MiB.
    pub store_bytes: Option<usize>,
    /// `SYMM_NVRTC_PATH`: NVIDIA's run-time compiler, or its directory; absent: searched for.
    pub nvrtc: Option<PathBuf>,
    /// `SYMM_CACHE_DIR`: an absolute path, or `0` for no cache; absent:
    /// `$XDG_CACHE_HOME/torch_symm`, or `$HOME/.cache/torch_symm` if that is unset.
    pub cache_dir: CacheDir,
    /// `SYMM_TOPOLOGY_FILE`: a JSON file that describes how GPUs are connected, in place of NVML
    /// (`docs/design/topology.md`). Default: none.
    pub topology_file: Option<String>,
    /// `SYMM_BLOCKING_WAIT`: `1` makes `Work.wait()` of a CUDA call block the host until the call
    /// has ended, and raise its failure. Default off.
    pub blocking_wait: bool,
    /// `SYMM_DEBUG`: comma-separated words. `call_site`: ranks also compare the program line that
    /// makes each collective.
    pub debug_call_site: bool,
    /// `SYMM_INTER_NODE_BACKEND`: `none`, `gloo`, `nccl`, `auto` (the default) or backends of
    /// torch, which connect the nodes of a group whose options name no backend; the same on all
    /// ranks.
    pub inter_node: String,
    /// `SYMM_ORDER`: `rank` (the default) or `tree`, the order of sums in groups whose options set
    /// no order.
    pub order: SumOrder,
    /// `SYMM_CTA_POLICY`: `default`, `efficiency` or `zero`, and `SYMM_MAX_CTAS`: a number of
    /// blocks; absent: no limit. For groups whose options set neither (`docs/guide/gpus.md`).
    pub ctas: CtaOptions,
    /// `SYMM_REPLACE_GLOO`: `1` makes symm serve the CPU tensors of Gloo groups. Python reads it
    /// before Rust does; see `python/torch_symm/_replace_gloo.py`. Default: 0.
    pub replace_gloo: bool,
    /// `GLOO_SOCKET_IFNAME`, Gloo's variable: comma-separated interfaces of the network between
    /// nodes; absent: the interface of the host name's address.
    pub gloo_interface: Option<String>,
    /// `RANK`, torchrun's variable: the rank in log lines; absent: they name the process.
    pub rank: Option<u32>,
    /// `SYMM_STATS_INTERVAL`: seconds between two tables of statistics; 0, the default, disables
    /// them.
    pub stats_seconds: u64,
    /// `SYMM_TEST_NODE`, for tests: ranks with different values take each other to be on other
    /// nodes. Default: empty.
    pub test_node: String,
    /// `SYMM_TRACE_DIR`: directory for dumps (`docs/guide/trace.md`), absolute; absent: a directory
    /// in `temporary` that belongs to the user.
    pub trace_dir: Option<PathBuf>,
    /// `TMPDIR`, or `/tmp` if that is unset.
    pub temporary: PathBuf,
    /// `SYMM_VLLM`: `1` makes vLLM's tensor-parallel groups use symm, `unfused` without fused
    /// norms. Only Python uses it (`python/torch_symm/engines/vllm`). Default: empty.
    pub vllm: String,
    /// `SYMM_SGLANG`: `1` makes SGLang's tensor-parallel groups use symm. Only Python uses it
    /// (`python/torch_symm/engines/sglang.py`). Default: 0.
    pub sglang: bool,
    /// `TORCH_GLOO_LAZY_INIT`, torch's variable: Gloo connects two ranks when they first exchange
    /// data.
    pub gloo_lazy: bool,
}

/// The environment variables that start with `SYMM_` and are settings.
const SETTINGS: [&str; 25] = [
    "SYMM_ALLOW_SHARED_GPUS",
    "SYMM_BLOCKING_WAIT",
    "SYMM_CACHE_DIR",
    "SYMM_CMA",
    "SYMM_COST_PROFILE",
    "SYMM_CPU_THREADS",
    "SYMM_CTA_POLICY",
    "SYMM_CUDA_TUNING",
    "SYMM_DEBUG",
    "SYMM_INTER_NODE_BACKEND",
    "SYMM_LOG",
    "SYMM_MAX_CTAS",
    "SYMM_NVRTC_PATH",
    "SYMM_ORDER",
    "SYMM_P2P",
    "SYMM_REPLACE_GLOO",
    "SYMM_SGLANG",
    "SYMM_SPIN",
    "SYMM_STATS_INTERVAL",
    "SYMM_STORE_MAX_BYTES",
    "SYMM_TEST_NODE",
    "SYMM_TOPOLOGY_FILE",
    "SYMM_TRACE_DIR",
    "SYMM_VLLM",
    "SYMM_WORKSPACE_MB",
];

/// Variables with the same prefix that configure the build, the tests and the examples instead.
const OTHER_PREFIXES: [&str; 4] = ["SYMM_PYTHON", "SYMM_RUST_ALONE", "SYMM_TEST_", "SYMM_RANDOM_"];

/// Returns a complaint about a variable that looks like a setting but is not one.
fn misspelt(name: &str) -> Option<String> {
    let looks = name.starts_with("SYMM_")
        && !SETTINGS.contains(&name)
        && !OTHER_PREFIXES.iter().any(|other| name.starts_with(other));
    // A name with "SECRET" may be the user's own: `secret_env` names the variable that holds a
    // store's secret.
    (looks && !name.contains("SECRET")).then(|| {
        let nearest = SETTINGS.iter().map(|known| (edits(name, known), known)).min();
        match nearest {
            Some((edits, known)) if edits <= 3 => {
                format!("unknown setting {name} ignored; did you mean {known}?")
            }
            _ => format!("unknown setting {name} ignored; known settings: {}", SETTINGS.join(", ")),
        }
    })
}

/// Returns the Levenshtein distance of two names.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let cost = (diagonal + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], cost);
        }
    }
    row[b.len()]
}

/// Returns the first word of an `env_logger` filter that is neither a level nor the name of a
/// module of this crate.
fn unknown_level(filter: &str) -> Option<&str> {
    let directives = filter
        .split('/')
        .next()
        .unwrap_or_default()
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty());
    directives.into_iter().find(|directive| match directive.split_once('=') {
        Some((_, level)) => level.trim().parse::<log::LevelFilter>().is_err(),
        None => directive.parse::<log::LevelFilter>().is_err() && !directive.starts_with("symm"),
    })
}

/// Lists the settings that `lookup` finds, except those with complaints, as a sentence.
fn in_force(lookup: impl Fn(&str) -> Option<String>, complaints: &[String]) -> String {
    let ignored = |name: &str| complaints.iter().any(|complaint| complaint.starts_with(name));
    let shown = |name: &&str| {
        Some(format!("{name}={}", lookup(name).filter(|value| !value.trim().is_empty())?.trim()))
    };
    let set: Vec<String> =
        SETTINGS.iter().filter(|name| !ignored(name)).filter_map(shown).collect();
    match set.len() {
        0 => "all settings have their defaults".into(),
        _ => format!("settings: {}; all others have their defaults", set.join(", ")),
    }
}

impl Config {
    /// Parses the settings that `lookup` finds, and returns a complaint for each unusable value.
    fn parse(lookup: impl Fn(&str) -> Option<String>) -> (Self, Vec<String>) {
        let set = |name: &str| {
            lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
        };
        let mut complaints = Vec::new();
        let log = set("SYMM_LOG").filter(|filter| {
            let unknown = unknown_level(filter);
            if let Some(word) = unknown {
                complaints.push(format!(
                    "SYMM_LOG: {word:?} is none of off, error, warn, info, \
                    debug, trace; \"warn\" is used"
                ));
            }
            unknown.is_none()
        });
        let mut number = |name: &str, range: RangeInclusive<u64>| {
            let value = set(name)?;
            let valid = value.parse::<u64>().ok().filter(|number| range.contains(number));
            if valid.is_none() {
                let (least, most) = range.into_inner();
                complaints.push(format!(
                    "{name}={value:?} is not a whole number from {least} to {most}; ignored"
                ));
            }
            valid
        };
        let spin = number("SYMM_SPIN", 0..=u32::MAX.into()).map(|spin| spin as u32);
        let cpu_threads = number("SYMM_CPU_THREADS", 1..=64).map(|threads| threads as usize);
        let max_ctas = number("SYMM_MAX_CTAS", 1..=u32::MAX.into()).map(|most| most as usize);
        let store_bytes =
            number("SYMM_STORE_MAX_BYTES", 4096..=1 << 50).map(|bytes| bytes as usize);
        let workspace_mb =
            number("SYMM_WORKSPACE_MB", 1..=1 << 20).map_or(512, |mebibytes| mebibytes as usize);
        let stats_seconds = number("SYMM_STATS_INTERVAL", 0..=1_000_000).unwrap_or(0);
        let mut checked = |name: &str, is_valid: fn(&str) -> bool, why: &str| {
            set(name).filter(|value| {
                if !is_valid(value) {
                    complaints.push(format!("{name}={value:?} is {why}; ignored"));
                }
                is_valid(value)
            })
        };
        let mut switch = |name: &str, usual: bool| {
            checked(name, |value| value == "0" || value == "1", "neither 0 nor 1")
                .map_or(usual, |value| value == "1")
        };
        let (cma, p2p) = (switch("SYMM_CMA", true), switch("SYMM_P2P", true));
        let (blocking_wait, shared_gpus) =
            (switch("SYMM_BLOCKING_WAIT", false), switch("SYMM_ALLOW_SHARED_GPUS", false));
        let (replace_gloo, sglang) =
            (switch("SYMM_REPLACE_GLOO", false), switch("SYMM_SGLANG", false));
        let trace_dir =
            checked("SYMM_TRACE_DIR", |path| path.starts_with('/'), "not an absolute path");
        let vllm = checked(
            "SYMM_VLLM",
            |choice| ["0", "1", "unfused"].contains(&choice),
            "neither 0, 1 nor unfused",
        );
        let order =
            checked("SYMM_ORDER", |name| SumOrder::named(name).is_some(), "neither rank nor tree");
        let policy = checked(
            "SYMM_CTA_POLICY",
            |name| CtaPolicy::named(name).is_some(),
            "neither default, efficiency nor zero",
        );
        // The XDG specification says to ignore a relative path.
        let absolute = |name: &str| set(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let usual = || {
            absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        };
        let usual =
            || usual().map_or(CacheDir::Unknown, |caches| CacheDir::At(caches.join("torch_symm")));
        let cache_dir = match set("SYMM_CACHE_DIR").as_deref() {
            None => usual(),
            Some("0") => CacheDir::Off,
            Some(path) if path.starts_with('/') => CacheDir::At(path.into()),
            Some(path) => {
                complaints.push(format!(
                    "SYMM_CACHE_DIR={path:?} is neither 0 nor an absolute path; ignored"
                ));
                usual()
            }
        };
        let mut debug_call_site = false;
        for word in set("SYMM_DEBUG")
            .iter()
            .flat_map(|words| words.split(','))
            .map(str::trim)
            .filter(|word| !word.is_empty())
        {
            match word {
                "call_site" => debug_call_site = true,
                _ => complaints
                    .push(format!("SYMM_DEBUG: {word:?} is not known, \"call_site\" is; ignored")),
            }
        }
        let config = Self {
            log: log.unwrap_or_else(|| "warn".into()),
            restart: set("TORCHELASTIC_RESTART_COUNT").unwrap_or_else(|| "0".into()),
            spin,
            cpu_threads,
            cma,
            workspace_mb,
            p2p,
            one_gpu_queue: set("CUDA_DEVICE_MAX_CONNECTIONS").as_deref() == Some("1"),
            shared_gpus,
            cuda_tuning: set("SYMM_CUDA_TUNING").unwrap_or_default(),
            profile: match set("SYMM_COST_PROFILE").as_deref() {
                None => ProfileChoice::Search,
                Some("0") => ProfileChoice::Off,
                Some(path) => ProfileChoice::At(path.into()),
            },
            store_bytes,
            nvrtc: set("SYMM_NVRTC_PATH").map(PathBuf::from),
            cache_dir,
            topology_file: set("SYMM_TOPOLOGY_FILE"),
            blocking_wait,
            debug_call_site,
            inter_node: set("SYMM_INTER_NODE_BACKEND").unwrap_or_else(|| "auto".into()),
            order: order.and_then(|name| SumOrder::named(&name)).unwrap_or_default(),
            ctas: CtaOptions {
                policy: policy.and_then(|name| CtaPolicy::named(&name)).unwrap_or_default(),
                most: max_ctas,
            },
            replace_gloo,
            gloo_interface: set("GLOO_SOCKET_IFNAME"),
            rank: set("RANK").and_then(|rank| rank.parse().ok()),
            stats_seconds,
            test_node: set("SYMM_TEST_NODE").unwrap_or_default(),
            trace_dir: trace_dir.map(PathBuf::from),
            vllm: vllm.unwrap_or_default(),
            sglang,
            temporary: absolute("TMPDIR").unwrap_or_else(|| "/tmp".into()),
            gloo_lazy: set("TORCH_GLOO_LAZY_INIT").is_some_and(|value| value != "0"),
        };
        (config, complaints)
    }

    /// Returns the settings of this process. The first call also starts logging. A forked child
    /// reads its own.
    pub fn get() -> &'static Self {
        static CONFIG: PerProcess<OnceLock<Config>> = PerProcess::new(OnceLock::new);
        CONFIG.get().get_or_init(|| {
            let lookup = |name: &str| std::env::var(name).ok();
            let (config, mut complaints) = Self::parse(lookup);
            let in_force = in_force(lookup, &complaints);
            complaints.extend(std::env::vars_os().filter_map(|(name, _)| misspelt(name.to_str()?)));
            logging::start(&config.log, config.rank);
            for complaint in complaints {
                log::warn!("{complaint}");
            }
            log::info!("{in_force}");
            config
        })
    }
}

#[cfg(test)]
mod tests;
