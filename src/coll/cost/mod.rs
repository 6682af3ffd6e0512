//! Costs of collectives on a dimension of a mesh, in microseconds.
//!
//! One type, [`Model`], has three bases: torch's constants and formula ([`crate::topo::cost`]);
//! detected links, with the bytes and trips of the algorithm that [`plan`](crate::coll::plan)
//! chooses ([`algorithms`]); and times measured on this hardware, by algorithm ([`profile`],
//! [`curve`]). The model is here and not in `topo` because a price depends on the algorithm that
//! runs at that size, and `topo` must not depend on algorithms. [`network`] has inter-node
//! measurements. See `docs/design/cost-model.md`.

mod algorithms;
mod curve;
pub mod hardware;
mod internode;
pub mod network;
pub mod profile;

use crate::coll::call::Collective;
use crate::coll::cuda::plan::CudaThresholds;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::topo::cost::{self, LinkCost};
use algorithms::Algorithms;
use hardware::{DeviceKind, Hardware};
use profile::{GroupTimes, Profile, RedistributeCosts};
use std::path::PathBuf;

/// The basis of prices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// torch's formula.
    Torch,
    /// Links and algorithms.
    Links,
    /// A profile, and links where it has no measurement.
    Measured,
}

/// The mesh to be priced.
#[derive(Clone, Debug)]
pub struct Mesh {
    /// The device of the tensors.
    pub device: DeviceKind,
    /// Number of ranks along each dimension.
    pub ranks: Vec<usize>,
    /// Number of the job's ranks on this node.
    pub job: usize,
    /// Number of devices of a node.
    pub per_node: usize,
}

/// Prices on one mesh.
#[derive(Debug)]
pub struct Model {
    basis: Basis,
    dims: Vec<MeshDim>,
    origin: String,
    reference_us: f64,
    local: Option<RedistributeCosts>,
}

#[derive(Debug)]
struct MeshDim {
    ranks: usize,
    link: LinkCost,
    algorithms: Algorithms,
    measured: Option<GroupTimes>,
    /// Set if the dimension spans nodes: `link` then connects nodes, and `algorithms` and
    /// `measured` are for the ranks of one node.
    span: Option<InternodeDim>,
}

/// A dimension's groups on several nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct InternodeDim {
    nodes: usize,
    /// Number of a group's ranks on one node.
    local_size: usize,
    /// Traffic on one link to other nodes, divided by the traffic that one group sends from a node:
    /// on CPU the number of groups that share the node's link; on CUDA 1 / `local_size`, since each
    /// rank has a link.
    load: f64,
    /// Link between the ranks of a node.
    intra_node: LinkCost,
}

/// Returns the collective with this name, if it has a price.
fn priced(name: &str) -> Result<Collective> {
    const PRICED: [Collective; 5] = [
        Collective::AllGather,
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllToAll,
        Collective::Broadcast,
    ];
    let known = PRICED.iter().copied().find(|op| op.name() == name);
    known.ok_or_else(|| {
        Error::value(format!(
            "{name:?} has no price; {} have one",
            PRICED.map(Collective::name).join(", ")
        ))
    })
}

impl Model {
    /// Makes a model of torch's formula over torch's links, or over `links`.
    pub fn torch(mesh: &Mesh, links: Option<Vec<LinkCost>>) -> Result<Self> {
        let origin = if links.is_some() {
            "torch's formula, links as given"
        } else {
            "torch's formula and constants"
        };
        let links = links.unwrap_or_else(|| cost::torch_links(&mesh.ranks, mesh.per_node));
        Self::new(Basis::Torch, mesh, links, None, origin.into())
    }

    /// Makes a model of the detected links, or of `links`.
    pub fn links(mesh: &Mesh, links: Option<Vec<LinkCost>>) -> Result<Self> {
        let (links, origin) = match links {
            Some(links) => (links, "links as given".into()),
            None => internode::detected(mesh)?,
        };
        Self::new(Basis::Links, mesh, links, None, origin)
    }

    /// Makes a model of the profile that [`profile::find`] finds for this hardware. Whatever it
    /// lacks is priced over `links`, or over detected links. `None` if no profile exists.
    ///
    /// # Errors
    /// The errors of [`profile::find`].
    pub fn measured(mesh: &Mesh, links: Option<Vec<LinkCost>>) -> Result<Option<Self>> {
        let Some(hardware) = Hardware::here(mesh.device, mesh.job) else { return Ok(None) };
        profile::find(&hardware)?.map(|found| Self::of_profile(mesh, links, found)).transpose()
    }

    /// Makes a model of `found`, a profile and the path of its file.
    pub fn of_profile(
        mesh: &Mesh,
        links: Option<Vec<LinkCost>>,
        (profile, path): (Profile, PathBuf),
    ) -> Result<Self> {
        let links =
            links.map_or_else(|| internode::known(mesh, profile.inter_node.as_ref()), Ok)?;
        let origin = format!(
            "measured {} on {} ({})",
            profile.measured.date,
            profile.hardware,
            path.display()
        );
        Self::new(Basis::Measured, mesh, links, Some(&profile), origin)
    }

    fn new(
        basis: Basis,
        mesh: &Mesh,
        links: Vec<LinkCost>,
        profile: Option<&Profile>,
        origin: String,
    ) -> Result<Self> {
        if links.len() != mesh.ranks.len() {
            return Err(Error::value(format!(
                "{} links for a mesh of {} dimensions",
                links.len(),
                mesh.ranks.len()
            )));
        }
        if let Some(link) = links.iter().find(|link| !(link.gb_per_s > 0.0 && link.us >= 0.0)) {
            return Err(Error::value(format!(
                "a link of {} GB/s and {} µs; bandwidth must be above 0, latency at least",
                link.gb_per_s, link.us
            )));
        }
        let spans =
            if basis == Basis::Torch { vec![None; links.len()] } else { internode::spans(mesh)? };
        let dims = mesh.ranks.iter().zip(links).zip(spans);
        let dims = dims
            .map(|((&ranks, link), span)| dim(mesh, ranks, link, span, profile))
            .collect::<Result<_>>()?;
        let reference_us = profile.map_or(0.0, |profile| profile.measured.reference_us);
        Ok(Self {
            basis,
            dims,
            origin,
            reference_us,
            local: profile.and_then(|profile| profile.local),
        })
    }

    fn dim(&self, dim: usize) -> Result<&MeshDim> {
        self.dims
            .get(dim)
            .ok_or_else(|| Error::value(format!("mesh dimension {dim} of {}", self.dims.len())))
    }

    /// Returns the microseconds of the collective named `op` along mesh dimension `dim` while all
    /// its groups are active. `bytes` is the size of the longest tensor that a rank sends or
    /// receives: the output of all_gather, the input of reduce_scatter and all_to_all.
    pub fn us(&self, op: &str, bytes: f64, dim: usize) -> Result<f64> {
        let (op, MeshDim { ranks, link, algorithms, measured, span }) =
            (priced(op)?, self.dim(dim)?);
        if !(bytes >= 0.0 && bytes.is_finite()) {
            return Err(Error::value(format!("{bytes} bytes cannot be moved")));
        }
        if self.basis == Basis::Torch {
            return Ok(match op {
                Collective::AllReduce | Collective::AllReduceAddRmsNorm => {
                    cost::torch_ring(bytes, *ranks, 2, *link)
                }
                Collective::AllToAll => cost::torch_all_to_all(bytes, *ranks, *link),
                Collective::Broadcast => cost::torch_broadcast(bytes, *ranks, *link),
                Collective::AllGather
                | Collective::ReduceScatter
                | Collective::Barrier
                | Collective::Reduce
                | Collective::Gather
                | Collective::Scatter => cost::torch_ring(bytes, *ranks, 1, *link),
            });
        }
        if *ranks == 1 {
            return Ok(0.0);
        }
        let on_one_node = |ranks: usize, link: LinkCost| {
            let measured = measured
                .as_ref()
                .and_then(|group| group.us(op, algorithms.name(op, bytes, ranks), bytes));
            measured.unwrap_or_else(|| algorithms.estimate(op, bytes, ranks, link))
        };
        Ok(match span {
            None => on_one_node(*ranks, *link),
            Some(span) => {
                let inside = if span.local_size > 1 {
                    on_one_node(span.local_size, span.intra_node)
                } else {
                    0.0
                };
                inside + span.us(op, bytes, *link)
            }
        })
    }

    /// Returns the algorithm that runs `op` on tensors of `bytes` along `dim`.
    pub fn algorithm(&self, op: &str, bytes: f64, dim: usize) -> Result<&'static str> {
        let (op, dim) = (priced(op)?, self.dim(dim)?);
        Ok(match dim.span {
            _ if self.basis == Basis::Torch => "ring",
            Some(_) => "two_level",
            None => dim.algorithms.name(op, bytes.max(0.0), dim.ranks),
        })
    }

    /// Returns the basis of the price of `op` along `dim`.
    pub fn basis(&self, op: &str, dim: usize) -> Result<Basis> {
        let (op, dim) = (priced(op)?, self.dim(dim)?);
        let measured =
            dim.span.is_none() && dim.measured.as_ref().is_some_and(|group| group.has(op));
        Ok(if self.basis == Basis::Measured && !measured { Basis::Links } else { self.basis })
    }

    /// Returns the link of each dimension.
    pub fn dim_links(&self) -> impl Iterator<Item = LinkCost> {
        self.dims.iter().map(|dim| dim.link)
    }

    /// Returns [`MeasuredOn::reference_us`](profile::MeasuredOn::reference_us) of the profile; 0 if
    /// the model has no profile.
    pub fn reference_us(&self) -> f64 {
        self.reference_us
    }

    /// Returns the cost of the steps of a redistribution without their collectives; `None` if it
    /// was not measured.
    pub fn local(&self) -> Option<RedistributeCosts> {
        self.local
    }

    /// Returns the origin of the whole model, for human readers.
    pub fn origin(&self) -> &str {
        &self.origin
    }
}

fn dim(
    mesh: &Mesh,
    ranks: usize,
    link: LinkCost,
    span: Option<InternodeDim>,
    profile: Option<&Profile>,
) -> Result<MeshDim> {
    if ranks == 0 {
        return Err(Error::value("a mesh dimension of no ranks"));
    }
    let near = span.map_or(ranks, |span| span.local_size);
    let measured = profile.and_then(|profile| profile.group(near)).cloned();
    let config = Config::get();
    let thresholds = measured.as_ref().map(GroupTimes::thresholds).unwrap_or_default();
    let mut tuning = CudaThresholds::of(near);
    for text in [measured.as_ref().map_or("", |group| &group.cuda_tuning), &config.cuda_tuning] {
        // An unreadable tuning is ignored. The set-up of a group ignores it too, and warns.
        tuning = tuning.overlaid(text).unwrap_or(tuning);
    }
    let algorithms =
        Algorithms::of(mesh.device, near, config.workspace_mb << 20, thresholds, tuning);
    Ok(MeshDim { ranks, link, algorithms, measured, span })
}

#[cfg(test)]
mod tests;
