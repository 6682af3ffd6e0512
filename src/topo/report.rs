//! The topology as a table, like `nvidia-smi topo -m`.

use super::ancestry::PciAncestor;
use super::device::{Gpu, Mig};
use super::{Topology, TopologySource};

/// Renders a summary, a table with a row per GPU, the pairs without peer access, and a legend.
pub fn render(detected: &Topology) -> String {
    let gpus = &detected.gpus;
    let source = match &detected.source {
        TopologySource::Nvml => "NVML".into(),
        TopologySource::Injected(path) => path.clone(),
        TopologySource::Absent(reason) => reason.clone(),
    };
    let noun = if gpus.len() == 1 { "GPU" } else { "GPUs" };
    let mut text = format!("{} {noun}, {} ({source})\n", gpus.len(), detected.topology);
    if gpus.is_empty() {
        return text;
    }
    let heads = (0..gpus.len()).map(|gpu| format!("GPU{gpu}"));
    let tail = ["PCI", "NUMA", "NVLink", "name"].map(String::from);
    let mut table = vec![[String::new()].into_iter().chain(heads).chain(tail).collect::<Vec<_>>()];
    table.extend((0..gpus.len()).map(|gpu| row(detected, gpu)));
    text.push('\n');
    text.push_str(&align(&table));
    text.push_str(&unlinked(detected));
    text.push_str("\nNV# = so many NVLinks\n");
    for ancestor in PciAncestor::ALL {
        text.push_str(&format!("{} = {}\n", ancestor.label(), ancestor.meaning()));
    }
    text
}

fn row(detected: &Topology, gpu: usize) -> Vec<String> {
    let Gpu { bus, name, numa, nvlink, mig, .. } = &detected.gpus[gpu];
    let cells = (0..detected.gpus.len()).map(|other| cell(detected, gpu, other));
    let name = match mig {
        Mig::Off => name.clone(),
        Mig::On(instances) => format!("{name} (MIG, {} instances)", instances.len()),
    };
    let known = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    let tail = [
        format!("{bus}.0"),
        known(numa.map(|node| node.to_string())),
        known(nvlink.map(|version| version.to_string())),
        name,
    ];
    [format!("GPU{gpu}")].into_iter().chain(cells).chain(tail).collect()
}

fn cell(detected: &Topology, gpu: usize, other: usize) -> String {
    let place = |gpu: usize| (detected.gpus[gpu].path.as_deref(), detected.gpus[gpu].numa);
    match detected.mesh.links(gpu, other) {
        _ if gpu == other => PciAncestor::Same.label().into(),
        0 => PciAncestor::common(place(gpu), place(other)).label().into(),
        links => format!("NV{links}"),
    }
}

/// Pads each column to its widest cell.
fn align(table: &[Vec<String>]) -> String {
    let columns = table.first().map_or(0, Vec::len);
    let width =
        |column: usize| table.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    table.iter().map(line).collect()
}

fn unlinked(detected: &Topology) -> String {
    let size = detected.gpus.len();
    let pairs = (0..size).flat_map(|a| (a + 1..size).map(move |b| (a, b)));
    let apart: Vec<String> =
        pairs.filter(|&(a, b)| !detected.peers.at(a, b)).map(|(a, b)| format!("{a}-{b}")).collect();
    match (apart.len(), size * (size - 1) / 2) {
        (0, _) => String::new(),
        (none, all) if none == all => "\nno pair has peer access\n".into(),
        (_, _) => format!("\nno peer access: {}\n", apart.join(" ")),
    }
}
