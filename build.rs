//! The package's version; with feature `bridge` also the C++ side of the bridge, which needs
//! neither Python nor torch.

use std::fs::read_to_string;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let stated = "python/torch_symm/_version.py";
    println!("cargo::rerun-if-changed={stated}");
    let text = read_to_string(stated).expect("the file is part of the repository");
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("__version__ = "))
        .expect("the file states it");
    println!("cargo::rustc-env=TORCH_SYMM_VERSION={}", version.trim_matches('"'));
    #[cfg(feature = "bridge")]
    bridge();
}

#[cfg(feature = "bridge")]
fn bridge() {
    const BRIDGES: [&str; 5] = [
        "src/bridge.rs",
        "src/bridge/cost.rs",
        "src/bridge/fused.rs",
        "src/bridge/native_store.rs",
        "src/bridge/transport.rs",
    ];
    for file in BRIDGES {
        println!("cargo::rerun-if-changed={file}");
    }
    println!("cargo::rerun-if-changed=cpp/symm_bridge.hpp");
    println!("cargo::rerun-if-changed=cpp/symm_bridge.cpp");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    let mut build = cxx_build::bridges(BRIDGES);
    build.file("cpp/symm_bridge.cpp").include("cpp").std("c++20").debug(false).opt_level(2);
    build.flag(format!("-ffile-prefix-map={out}=generated"));
    build.compile("symm_bridge");
}
