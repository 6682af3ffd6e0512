//! The text of the kernels, which is part of this library.

use crate::error::{Error, Result};
pub use symm_cuda_sources::{HEADERS, Header, PROGRAMS, Program};

/// Returns the program with this name.
pub fn program(name: &str) -> Result<&'static Program> {
    let found = PROGRAMS.iter().find(|program| program.name == name);
    found.ok_or_else(|| {
        Error::internal(format!(
            "there is no kernel program {name:?}; there are {}",
            PROGRAMS.len()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Counts the files below `folder` with this extension.
    fn count(folder: &Path, ending: &str) -> usize {
        let entries = std::fs::read_dir(folder)
            .expect("a folder")
            .map(|entry| entry.expect("an entry").path());
        entries
            .map(|path| {
                if path.is_dir() {
                    count(&path, ending)
                } else {
                    usize::from(path.extension().is_some_and(|e| e == ending))
                }
            })
            .sum()
    }

    #[test]
    fn every_file_is_there_under_its_name() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels/cuda");
        assert_eq!((HEADERS.len(), PROGRAMS.len()), (count(&root, "cuh"), count(&root, "cu")));
        for header in HEADERS {
            assert_eq!(
                std::fs::read_to_string(root.join("include").join(header.name)).expect("a header"),
                header.text
            );
        }
        for program in PROGRAMS {
            assert_eq!(
                std::fs::read_to_string(root.join(format!("{}.cu", program.name)))
                    .expect("a program"),
                program.text
            );
            assert_eq!(super::program(program.name), Ok(program));
        }
    }

    #[test]
    fn an_unknown_program_is_named() {
        let error = program("reduce/nothing").expect_err("no such program");
        assert!(error.message.contains("\"reduce/nothing\""), "{error}");
    }
}
