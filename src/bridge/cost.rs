//! Prices of collectives, for C++.

use super::ffi::{CostMesh, CostModelResult, LocalCost, Price, TextResult};
use super::guarded;
use crate::coll::cost::hardware::{DeviceKind, Hardware};
use crate::coll::cost::profile::{self, Profile, RedistributeCosts};
use crate::coll::cost::{Basis, Mesh, Model};
use crate::error::{Error, Result};
use crate::topo::cost::LinkCost;
use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// A model, or the error that prevented one.
pub struct CostModel(Result<Model>);

pub(super) fn cost_model(mesh: &CostMesh, basis: &str, gb_per_s: &[f64], us: &[f64], profile: &[u8]) -> CostModelResult {
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

fn make(mesh: &CostMesh, basis: &str, gb_per_s: &[f64], us: &[f64], profile: &[u8]) -> Result<Option<Model>> {
    let CostMesh { device, ranks, job, per_node } = mesh;
    let mesh = Mesh { device: DeviceKind::named(device)?, ranks: ranks.clone(), job: *job, per_node: *per_node };
    if gb_per_s.len() != us.len() {
        return Err(Error::value(format!("{} bandwidths, but {} latencies", gb_per_s.len(), us.len())));
    }
    let links: Vec<LinkCost> = gb_per_s.iter().zip(us).map(|(&gb_per_s, &us)| LinkCost { gb_per_s, us }).collect();
    let links = (!links.is_empty()).then_some(links);
    match basis {
        "torch" => Model::torch(&mesh, links).map(Some),
        "links" => Model::links(&mesh, links).map(Some),
        "measured" if profile.is_empty() => Model::measured(&mesh, links),
        "measured" => {
            let path = Path::new(OsStr::from_bytes(profile));
            let here = Hardware::here(mesh.device, mesh.job).ok_or_else(|| Error::config("what hardware this is cannot be told"))?;
            Model::of_profile(&mesh, links, profile::accept(Profile::load(path)?, path, &here)?).map(Some)
        }
        other => Err(Error::value(format!("{other:?} is no basis of prices; there are torch, links and measured"))),
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
            local.unwrap_or(RedistributeCosts { step_us: 0.0, slice_us: 0.0, copy_gb_per_s: f64::INFINITY });
        LocalCost { known: local.is_some(), step_us, slice_us, copy_gb_per_s }
    }

    pub(super) fn gb_per_s(&self) -> Vec<f64> {
        self.model().map_or_else(|_| Vec::new(), |model| model.dim_links().map(|link| link.gb_per_s).collect())
    }

    pub(super) fn trip_us(&self) -> Vec<f64> {
        self.model().map_or_else(|_| Vec::new(), |model| model.dim_links().map(|link| link.us).collect())
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
        let key = here.map(|here| serde_json::json!({"file": here.file_name(), "says": here.to_string(), "hardware": here}));
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
