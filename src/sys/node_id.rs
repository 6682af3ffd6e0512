//! The identity of the kernel on which this process runs, and of its namespaces.

use super::fork::PerProcess;
use super::required::unreadable;
use crate::config::Config;
use crate::error::Result;
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// Processes with equal identity share a kernel, process ids, sockets, users and clocks, as one
/// node's ranks must.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeId {
    /// A random number that the kernel makes at boot.
    pub boot: String,
    /// Namespace of System V objects, which differs between containers.
    pub ipc: String,
    /// Namespace of abstract socket names.
    pub net: String,
    /// Namespace of process ids.
    pub pid: String,
    /// Namespace of user ids.
    pub user: String,
    /// Namespace of the clocks since boot, in which /proc reports start times; empty if the kernel
    /// lacks it (before 5.6).
    pub time: String,
    /// `SYMM_TEST_NODE`, with which tests divide one node into several; empty if unset.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub test: String,
}

impl NodeId {
    /// Returns the identity of this process's node.
    pub fn own() -> Result<Self> {
        static OWN: PerProcess<OnceLock<NodeId>> = PerProcess::new(OnceLock::new);
        match OWN.get().get() {
            Some(own) => Ok(own.clone()),
            None => Self::read().map(|own| OWN.get().get_or_init(|| own).clone()),
        }
    }

    /// Returns the names of the namespaces that differ from those of `other`. Each comes with the
    /// option that starts a container in the machine's namespace of this kind, or with an empty
    /// text if containers have no such option.
    pub fn namespaces_apart(&self, other: &Self) -> Vec<(&'static str, &'static str)> {
        let each = [
            ("pid", "--pid=host", &self.pid, &other.pid),
            ("ipc", "--ipc=host", &self.ipc, &other.ipc),
            ("net", "--network=host", &self.net, &other.net),
            ("user", "--userns=host", &self.user, &other.user),
            ("time", "", &self.time, &other.time),
        ];
        each.into_iter()
            .filter(|(_, _, own, its)| own != its)
            .map(|(name, option, ..)| (name, option))
            .collect()
    }

    fn read() -> Result<Self> {
        let boot = "/proc/sys/kernel/random/boot_id";
        let namespace = |name: &str| {
            let path = format!("/proc/self/ns/{name}");
            std::fs::read_link(&path)
                .map(|target| target.to_string_lossy().into_owned())
                .map_err(|error| unreadable(&path, &error))
        };
        Ok(Self {
            boot: std::fs::read_to_string(boot)
                .map_err(|error| unreadable(boot, &error))?
                .trim()
                .to_owned(),
            ipc: namespace("ipc")?,
            net: namespace("net")?,
            pid: namespace("pid")?,
            user: namespace("user")?,
            time: namespace("time").unwrap_or_default(),
            test: Config::get().test_node.clone(),
        })
    }
}

/// Returns the node's name, for messages.
pub fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns the model of the node's CPU as the kernel reports it, or the CPU's architecture.
pub fn cpu() -> &'static str {
    static MODEL: OnceLock<String> = OnceLock::new();
    MODEL.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let named = |field: &str| {
            text.lines().find(|line| line.starts_with(field)).and_then(|line| line.split_once(':'))
        };
        let name =
            named("model name").or_else(|| named("Model")).map_or("", |(_, name)| name.trim());
        if name.is_empty() { std::env::consts::ARCH.into() } else { name.into() }
    })
}
