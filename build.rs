//! Nothing without feature `torch`. With it: asks Python where torch is, compiles the bridge and `torch_backend/`, links torch.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "torch")]
    torch::build();
}

#[cfg(feature = "torch")]
mod torch {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// What the interpreter says: include paths, library path, torch's version.
    struct Facts {
        includes: Vec<String>,
        library: String,
        version: String,
    }

    const QUESTION: &str = "
import os, sysconfig, torch, torch.utils.cpp_extension as ext
root = os.path.dirname(torch.__file__)
print(torch.__version__)
print(os.path.join(root, 'lib'))
print(os.path.join(root, 'include'))
print(os.path.join(root, 'include', 'torch', 'csrc', 'api', 'include'))
print(sysconfig.get_paths()['include'])
";

    fn ask_python() -> Facts {
        let python = ["SYMM_PYTHON", "PYO3_PYTHON", "PYTHON_SYS_EXECUTABLE"].iter().find_map(|name| {
            println!("cargo::rerun-if-env-changed={name}");
            std::env::var(name).ok()
        });
        let python = python.unwrap_or_else(|| "python3".into());
        let answer = Command::new(&python).args(["-c", QUESTION]).env("TORCH_DEVICE_BACKEND_AUTOLOAD", "0").output();
        let answer = answer.unwrap_or_else(|e| panic!("feature torch needs Python with torch installed; {python} did not start: {e}"));
        assert!(
            answer.status.success(),
            "feature torch needs Python with torch installed; {python} says: {}",
            String::from_utf8_lossy(&answer.stderr)
        );
        let text = String::from_utf8_lossy(&answer.stdout).into_owned();
        let lines: Vec<String> = text.lines().map(String::from).collect();
        let header = Path::new(&lines[4]).join("Python.h");
        assert!(header.exists(), "the headers of {python} are missing ({}); install python3-dev", header.display());
        Facts { version: lines[0].clone(), library: lines[1].clone(), includes: lines[2..].to_vec() }
    }

    fn sources(folder: &str) -> Vec<PathBuf> {
        println!("cargo::rerun-if-changed={folder}");
        let entries = std::fs::read_dir(folder).expect("the folder is part of the repository");
        let mut found: Vec<PathBuf> =
            entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.extension().is_some_and(|e| e == "cpp")).collect();
        found.sort();
        found
    }

    pub(crate) fn build() {
        let facts = ask_python();
        let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
        println!("cargo::rerun-if-changed=src/bridge.rs");
        println!("cargo::rerun-if-changed=cpp");
        println!("cargo::rerun-if-changed={}/version.py", facts.library.trim_end_matches("/lib"));
        let out = std::env::var("OUT_DIR").expect("cargo sets it");
        let minor: Vec<&str> = facts.version.split('.').take(2).collect();
        println!("cargo::rustc-env=SYMM_TORCH_VERSION={}", minor.join("."));
        let mut build = cxx_build::bridge("src/bridge.rs");
        build.files(sources("torch_backend")).include("cpp").include("torch_backend").std("c++20");
        for include in &facts.includes {
            build.flag("-isystem").flag(include);
        }
        build
            .flag("-Wall")
            .flag("-Wextra")
            .flag("-Werror")
            .flag("-fvisibility=hidden")
            .flag(format!("-ffile-prefix-map={root}=."))
            .flag(format!("-ffile-prefix-map={out}=generated"))
            .flag(format!("-ffile-prefix-map={}=torch", facts.library.trim_end_matches("/lib")))
            .warnings(true)
            .debug(false)
            .opt_level(2)
            .compile("symm_torch");
        println!("cargo::rustc-link-search=native={}", facts.library);
        for library in ["torch_python", "torch", "torch_cpu", "c10"] {
            println!("cargo::rustc-link-lib=dylib={library}");
        }
        // torch is loaded already when the extension is; the path only serves tools that resolve it on disk.
        println!("cargo::rustc-link-arg-cdylib=-Wl,-rpath,$ORIGIN/../torch/lib");
    }
}
