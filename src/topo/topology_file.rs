//! A topology from a file, in place of the one that NVML reports.

use super::mesh::NvlMesh;
use super::square::Square;
use crate::error::{Error, Result};
use serde::Deserialize;
use std::io::Read;
use std::path::Path;

const MAX_GPUS: usize = 64;
const MAX_BYTES: u64 = 1 << 20;

/// The contents of a topology file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyFile {
    /// NVLinks between the GPUs.
    pub mesh: NvlMesh,
    /// Pairs that can access each other's memory.
    pub peers: Square<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    gpus: usize,
    links: Vec<Vec<u32>>,
    p2p: Peers,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "p2p is neither true nor false nor a matrix of them")]
enum Peers {
    All(bool),
    Pairs(Vec<Vec<bool>>),
}

impl TopologyFile {
    /// Loads the topology file at `path`, of at most 1 MiB. Every error names the file.
    pub fn load(path: &Path) -> Result<Self> {
        let refused =
            |why: String| Error::config(format!("topology file {}: {why}", path.display()));
        // Checked before it is opened, because opening a pipe would block until it has a writer.
        let kind = std::fs::metadata(path).map_err(|error| refused(error.to_string()))?;
        if !kind.is_file() {
            return Err(refused("it is not a regular file".into()));
        }
        let mut text = Vec::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut text));
        read.map_err(|error| refused(error.to_string()))?;
        Self::parse(&text).map_err(|error| refused(error.message))
    }

    /// Parses the topology in `text`.
    pub fn parse(text: &[u8]) -> Result<Self> {
        if text.len() as u64 > MAX_BYTES {
            return Err(Error::value(format!("it is longer than {MAX_BYTES} bytes")));
        }
        let file: File =
            serde_json::from_slice(text).map_err(|error| Error::value(error.to_string()))?;
        if file.gpus == 0 || file.gpus > MAX_GPUS {
            return Err(Error::value(format!(
                "{} GPUs; from 1 to {MAX_GPUS} are possible",
                file.gpus
            )));
        }
        let rows = |what: &str, rows: usize| {
            let message = || {
                Error::value(format!("{what} has {rows} rows, but there are {} GPUs", file.gpus))
            };
            if rows == file.gpus { Ok(()) } else { Err(message()) }
        };
        let of = |what: &'static str| {
            move |error: Error| Error::value(format!("{what}: {}", error.message))
        };
        rows("links", file.links.len())?;
        let mesh = NvlMesh::new(&file.links).map_err(of("links"))?;
        let peers = match file.p2p {
            Peers::All(granted) => Square::from_pairs(file.gpus, |a, b| a == b || granted),
            Peers::Pairs(pairs) => {
                rows("p2p", pairs.len())?;
                Square::new(&pairs).map_err(of("p2p"))?
            }
        };
        Ok(Self { mesh, peers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use proptest::prelude::*;

    fn refused(text: &str) -> String {
        TopologyFile::parse(text.as_bytes()).expect_err("the text is no topology").message
    }

    #[test]
    fn a_matrix_is_read() {
        let injected =
            TopologyFile::parse(br#"{"gpus": 2, "links": [[0, 4], [4, 0]], "p2p": true}"#)
                .expect("right");
        assert_eq!((injected.mesh.links(0, 1), injected.peers.at(1, 0)), (4, true));
        let injected = TopologyFile::parse(
            br#"{"gpus":2,"links":[[0,0],[0,0]],"p2p":[[true,false],[false,true]]}"#,
        )
        .expect("right");
        assert_eq!(
            (injected.mesh.links(0, 1), injected.peers.at(0, 0), injected.peers.at(0, 1)),
            (0, true, false)
        );
    }

    #[test]
    fn faults_are_sentences() {
        let cases = [
            (r#"{"gpus": 0, "links": [], "p2p": true}"#, "0 GPUs; from 1 to 64 are possible"),
            (r#"{"gpus": 65, "links": [], "p2p": true}"#, "65 GPUs; from 1 to 64 are possible"),
            (
                r#"{"gpus": 2, "links": [[0]], "p2p": true}"#,
                "links has 1 rows, but there are 2 GPUs",
            ),
            (
                r#"{"gpus": 2, "links": [[0, 1], [1]], "p2p": true}"#,
                "links: row 1 has 1 entries, but there are 2 rows",
            ),
            (
                r#"{"gpus": 1, "links": [[]], "p2p": true}"#,
                "links: row 0 has 0 entries, but there are 1 rows",
            ),
            (
                r#"{"gpus": 2, "links": [[0, 1], [2, 0]], "p2p": true}"#,
                "links: [0][1] is 1, but [1][0] is 2",
            ),
            (
                r#"{"gpus": 1, "links": [[1]], "p2p": true}"#,
                "links: [0][0] is 1, but no GPU is linked to itself",
            ),
            (r#"{"gpus": 1, "links": [[0]], "p2p": []}"#, "p2p has 0 rows, but there are 1 GPUs"),
            (
                r#"{"gpus": 2, "links": [[0,0],[0,0]], "p2p": [[true,true],[false,true]]}"#,
                "p2p: [0][1] is true, but [1][0] is false",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(refused(text), expected);
        }
        assert!(
            refused(r#"{"gpus": 1, "links": [[0]], "p2p": 1}"#)
                .starts_with("p2p is neither true nor false")
        );
        assert!(refused(r#"{"gpus": 1, "links": [[-1]], "p2p": true}"#).contains("expected u32"));
        assert!(refused(r#"{"gpus": 1, "links": [[0]]}"#).contains("missing field `p2p`"));
        assert!(
            refused(r#"{"gpus": 1, "links": [[0]], "p2p": true, "nodes": 2}"#)
                .contains("unknown field `nodes`")
        );
        assert_eq!(refused(&" ".repeat(1 << 21)), "it is longer than 1048576 bytes");
    }

    #[test]
    fn the_file_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("topology.json");
        let refused = |path: &Path, why: &str| {
            let error = TopologyFile::load(path).expect_err(why);
            let name = format!("topology file {}: ", path.display());
            assert_eq!(error.kind, ErrorKind::Config);
            assert!(error.message.starts_with(&name) && error.message.ends_with(why), "{error}");
        };
        refused(&file, "");
        for (text, why) in [("[]", ""), (&" ".repeat(3 << 20), "it is longer than 1048576 bytes")] {
            std::fs::write(&file, text).expect("it can be written");
            refused(&file, why);
        }
        refused(folder.path(), "it is not a regular file");
        std::fs::write(&file, r#"{"gpus": 1, "links": [[0]], "p2p": false}"#)
            .expect("it can be written");
        assert_eq!(TopologyFile::load(&file).map(|injected| injected.mesh.size()), Ok(1));
    }

    proptest! {
        #[test]
        fn bytes_never_panic(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = TopologyFile::parse(&text);
        }

        #[test]
        fn what_looks_right_never_panics(
            gpus in 0_usize..5, links in rows(0_u32..3), p2p in rows(any::<bool>())
        ) {
            let text = format!("{{\"gpus\": {gpus}, \"links\": {links:?}, \"p2p\": {p2p:?}}}");
            if let Ok(injected) = TopologyFile::parse(text.as_bytes()) {
                prop_assert_eq!((injected.mesh.size(), injected.peers.size()), (gpus, gpus));
                let rows: Vec<_> = injected.mesh.rows().map(<[u32]>::to_vec).collect();
                prop_assert_eq!(rows, links);
            }
        }
    }

    fn rows<T: std::fmt::Debug>(
        cell: impl Strategy<Value = T> + Clone,
    ) -> impl Strategy<Value = Vec<Vec<T>>> {
        (0_usize..4).prop_flat_map(move |size| {
            let row = prop::collection::vec(cell.clone(), size..size + 2);
            prop::collection::vec(row, size..size + 2)
        })
    }
}
