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
    struct Readings {
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

    fn ask_python() -> Readings {
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
        Readings { version: lines[0].clone(), library: lines[1].clone(), includes: lines[2..].to_vec() }
    }

    fn sources(folder: &str) -> Vec<PathBuf> {
        println!("cargo::rerun-if-changed={folder}");
        let mut found = Vec::new();
        add_sources(Path::new(folder), &mut found);
        found.sort();
        found
    }

    fn add_sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("the folder is part of the repository") {
            let path = entry.expect("a readable folder").path();
            if path.is_dir() {
                add_sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "cpp") {
                found.push(path);
            }
        }
    }

    /// Directives that keep the symbols through which Rust and C++ meet inside the extension.
    ///
    /// rustc exports every `#[no_mangle]` symbol of a cdylib and its dependencies, and neither GNU ld nor lld lets a second version
    /// script take names back. In ELF the most constraining visibility among all objects wins, so one object that calls them
    /// hidden is enough; `src/bridge.rs` carries it. `tests/python/test_package.py` notices a cxx that brings further names.
    fn hidden(generated: &str) -> String {
        let vec_of = "bool char f32 f64 i8 i16 i32 i64 isize str string u8 u16 u32 u64 usize";
        let vec = "new drop len capacity data_const data_mut reserve_total set_len truncate";
        let string = "new clone drop from_utf8 from_utf8_lossy from_utf16 from_utf16_lossy len capacity ptr_const ptr_mut \
                      reserve_additional reserve_total";
        let mut names: Vec<String> = vec!["cxxbridge1$exception".into()];
        names.extend(string.split_whitespace().map(|f| format!("cxxbridge1$string${f}")));
        names.extend("from len new ptr ref".split_whitespace().map(|f| format!("cxxbridge1$str${f}")));
        names.extend("len new ptr".split_whitespace().map(|f| format!("cxxbridge1$slice${f}")));
        for element in vec_of.split_whitespace() {
            names.extend(vec.split_whitespace().map(|f| format!("cxxbridge1$rust_vec${element}${f}")));
        }
        let words = generated.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$'));
        names.extend(words.filter(|word| word.contains("cxxbridge1$")).map(String::from));
        names.sort();
        names.dedup();
        names.iter().map(|name| format!(".globl \"{name}\"\n.hidden \"{name}\"\n")).collect()
    }

    pub(crate) fn build() {
        let facts = ask_python();
        let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
        println!("cargo::rerun-if-changed=src/bridge.rs");
        println!("cargo::rerun-if-changed=cpp");
        println!("cargo::rerun-if-changed={}/version.py", facts.library.trim_end_matches("/lib"));
        let out = std::env::var("OUT_DIR").expect("cargo sets it");
        let minor: Vec<&str> = facts.version.split('.').take(2).collect();
        let minor = minor.join(".");
        let stated = "python/torch_symm/_version.py";
        println!("cargo::rerun-if-changed={stated}");
        let text = std::fs::read_to_string(stated).expect("the file is part of the repository");
        assert!(
            text.contains(&format!("TORCH_VERSION = \"{minor}\"")),
            "{stated} names another torch than the installed {}: install that one, or change it there and in pyproject.toml",
            facts.version
        );
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
            .flag(format!("-ffile-prefix-map={}=python", facts.includes[2]))
            .flag(format!("-ffile-prefix-map={}=torch", facts.library.trim_end_matches("/lib")))
            .warnings(true)
            .debug(false)
            .opt_level(2);
        // Set where only Rust is looked at: C++ takes minutes.
        println!("cargo::rerun-if-env-changed=SYMM_RUST_ALONE");
        if std::env::var_os("SYMM_RUST_ALONE").is_none() {
            build.compile("symm_torch");
        }
        let bridge = format!("{out}/cxxbridge/sources/symm/src/bridge.rs.cc");
        let generated = std::fs::read_to_string(&bridge).unwrap_or_else(|e| panic!("cxx was to write {bridge}: {e}"));
        std::fs::write(format!("{out}/hidden.s"), hidden(&generated)).expect("cargo made the folder");
        println!("cargo::rustc-link-search=native={}", facts.library);
        for library in ["torch_python", "torch", "torch_cpu", "c10"] {
            println!("cargo::rustc-link-lib=dylib={library}");
        }
        // torch is loaded already when the extension is; the path only serves tools that resolve it on disk.
        println!("cargo::rustc-link-arg-cdylib=-Wl,-rpath,$ORIGIN/../torch/lib");
    }
}
