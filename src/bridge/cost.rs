//! Prices of collectives, for C++.
#![allow(unsafe_code, reason = "objects that C++ hands over")]

use super::guarded;
use crate::coll::cost::hardware::{DeviceKind, Hardware};
use crate::coll::cost::profile::{self, Profile, RedistributeCosts};
use crate::coll::cost::{Basis, Mesh, Model};
use crate::error::{Error, Result};
use crate::topo::cost::LinkCost;
use ffi::{CostMesh, CostModelResult, LocalCost, Price, TextResult};
use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// See `bridge::ffi`.
#[allow(missing_docs, unreachable_pub)] // cxx generates public items.
#[cxx::bridge(namespace = "symm")]
pub mod ffi {
    /// A mesh whose collectives are priced; `coll::cost::Mesh` documents the fields.
    struct CostMesh {
        device: String,
        ranks: Vec<usize>,
        job: usize,
        per_node: usize,
    }

    /// The result of opening a cost model: its prices, or the error. `found` is false if no profile
    /// fits this hardware.
    struct CostModelResult {
        status: Status,
        found: bool,
        model: Box<CostModel>,
    }

    /// Price of one collective, and its reason.
    struct Price {
        status: Status,
        us: f64,
        algorithm: String,
        basis: String,
    }

    /// `coll::cost::profile::RedistributeCosts`; costs that were not measured are 0.
    struct LocalCost {
        known: bool,
        step_us: f64,
        slice_us: f64,
        copy_gb_per_s: f64,
    }

    unsafe extern "C++" {
        include!("symm/src/bridge.rs.h");
        type Status = crate::bridge::ffi::Status;
        type TextResult = crate::bridge::ffi::TextResult;
    }

    extern "Rust" {
        /// `coll::cost::Model`.
        type CostModel;
        /// `basis`: `"torch"`, `"links"` or `"measured"`. If `gb_per_s`, `us` or `profile` is
        /// empty, the model chooses.
        fn cost_model(
            mesh: &CostMesh,
            basis: &str,
            gb_per_s: &[f64],
            us: &[f64],
            profile: &[u8],
        ) -> CostModelResult;
        /// Returns the price of the collective `op` on `bytes` along dimension `dim`.
        fn price(self: &CostModel, op: &str, bytes: f64, dim: usize) -> Price;
        /// Returns the times of a redistribution's steps other than collectives.
        fn local(self: &CostModel) -> LocalCost;
        /// Returns the bandwidth of each dimension's link in GB/s.
        fn gb_per_s(self: &CostModel) -> Vec<f64>;
        /// Returns the latency of each dimension's link in µs.
        fn trip_us(self: &CostModel) -> Vec<f64>;
        /// Returns the reference time of the profile; 0 if it has none.
        fn reference_us(self: &CostModel) -> f64;
        /// Returns the origin of the prices, for human readers.
        fn origin(self: &CostModel) -> String;
        /// Returns as JSON the hardware that identifies a job's profile, and the profile's file
        /// name; `null` if unknown.
        fn profile_key(device: &str, ranks: usize) -> TextResult;
        /// Sets the directory in which the package keeps its profiles, as raw bytes of the path.
        fn set_bundled_profile_dir(folder: &[u8]);
        /// Returns the directory of the user's profiles; empty if there is none.
        fn user_profile_dir() -> Vec<u8>;
    }
}

/// A model, or the error that prevented one.
pub(super) struct CostModel(Result<Model>);

pub(super) fn cost_model(
    mesh: &CostMesh,
    basis: &str,
    gb_per_s: &[f64],
    us: &[f64],
    profile: &[u8],
) -> CostModelResult {
    let mut model = Err(Error::config("no profile is for this hardware"));
    let mut found = false;
    let status = guarded(|| {
        if let Some(made) = make(mesh, basis, gb_per_s, us, profile)? {
            (found, model) = (true, Ok(made));
        }
        Ok(())
    });
    CostModelResult { status, found, model: Box::new(CostModel(model)) }
}

fn make(
    mesh: &CostMesh,
    basis: &str,
    gb_per_s: &[f64],
    us: &[f64],
    profile: &[u8],
) -> Result<Option<Model>> {
    let CostMesh { device, ranks, job, per_node } = mesh;
    let mesh = Mesh {
        device: DeviceKind::named(device)?,
        ranks: ranks.clone(),
        job: *job,
        per_node: *per_node,
    };
    if gb_per_s.len() != us.len() {
        return Err(Error::value(format!(
            "{} bandwidths, but {} latencies",
            gb_per_s.len(),
            us.len()
        )));
    }
    let links: Vec<LinkCost> =
        gb_per_s.iter().zip(us).map(|(&gb_per_s, &us)| LinkCost { gb_per_s, us }).collect();
    let links = (!links.is_empty()).then_some(links);
    match basis {
        "torch" => Model::torch(&mesh, links).map(Some),
        "links" => Model::links(&mesh, links).map(Some),
        "measured" if profile.is_empty() => Model::measured(&mesh, links),
        "measured" => {
            let path = Path::new(OsStr::from_bytes(profile));
            let here = Hardware::here(mesh.device, mesh.job)
                .ok_or_else(|| Error::config("what hardware this is cannot be told"))?;
            Model::of_profile(&mesh, links, profile::accept(Profile::load(path)?, path, &here)?)
                .map(Some)
        }
        other => Err(Error::value(format!(
            "{other:?} is no basis of prices; there are torch, links and measured"
        ))),
    }
}

impl CostModel {
    fn model(&self) -> Result<&Model> {
        self.0.as_ref().map_err(Clone::clone)
    }

    pub(super) fn price(&self, op: &str, bytes: f64, dim: usize) -> Price {
        let (mut us, mut algorithm, mut basis) = (0.0, String::new(), "");
        let status = guarded(|| {
            let model = self.model()?;
            us = model.us(op, bytes, dim)?;
            algorithm = model.algorithm(op, bytes, dim)?.into();
            basis = match model.basis(op, dim)? {
                Basis::Torch => "torch",
                Basis::Links => "links",
                Basis::Measured => "measured",
            };
            Ok(())
        });
        Price { status, us, algorithm, basis: basis.into() }
    }

    pub(super) fn local(&self) -> LocalCost {
        let local = self.model().ok().and_then(Model::local);
        let RedistributeCosts { step_us, slice_us, copy_gb_per_s } =
            local.unwrap_or(RedistributeCosts {
                step_us: 0.0,
                slice_us: 0.0,
                copy_gb_per_s: f64::INFINITY,
            });
        LocalCost { known: local.is_some(), step_us, slice_us, copy_gb_per_s }
    }

    pub(super) fn gb_per_s(&self) -> Vec<f64> {
        self.model().map_or_else(
            |_| Vec::new(),
            |model| model.dim_links().map(|link| link.gb_per_s).collect(),
        )
    }

    pub(super) fn trip_us(&self) -> Vec<f64> {
        self.model()
            .map_or_else(|_| Vec::new(), |model| model.dim_links().map(|link| link.us).collect())
    }

    pub(super) fn reference_us(&self) -> f64 {
        self.model().map_or(0.0, Model::reference_us)
    }

    pub(super) fn origin(&self) -> String {
        self.model().map_or_else(|error| error.message, |model| model.origin().to_owned())
    }
}

pub(super) fn profile_key(device: &str, ranks: usize) -> TextResult {
    let mut text = String::new();
    let status = guarded(|| {
        let here = Hardware::here(DeviceKind::named(device)?, ranks);
        let key = here.map(|here| {
            serde_json::json!({
                "file": here.file_name(), "says": here.to_string(), "hardware": here
            })
        });
        text = serde_json::to_string(&key).map_err(|error| Error::internal(error.to_string()))?;
        Ok(())
    });
    TextResult { status, text }
}

pub(super) fn set_bundled_profile_dir(folder: &[u8]) {
    guarded(|| {
        profile::shipped_in(OsStr::from_bytes(folder).into());
        Ok(())
    });
}

pub(super) fn user_profile_dir() -> Vec<u8> {
    profile::own_folder().map_or_else(Vec::new, |folder| folder.into_os_string().into_vec())
}
