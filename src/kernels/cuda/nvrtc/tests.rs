//! Tests with the real compiler, if `SYMM_NVRTC_PATH` names it (`make test-kernels`).

use super::super::source::HEADERS;
use super::find::{in_folder, search};
use super::*;
use crate::config::Config;
use std::io::Write;

/// A kernel that uses the header of every kernel.
const TINY: &str = "#include \"device.cuh\"\nstruct Words { u32* at; };\nKERNEL(tiny, Words) { \
    store_relaxed(args.at + thread(), RANK); }\n";

const OPTIONS: [&str; 4] =
    ["--gpu-architecture=sm_90", "--std=c++17", "-DSYMM_WORLD=2", "-DSYMM_RANK=1"];

/// Returns the compiler, or prints why the test does nothing.
fn compiler() -> Option<&'static Nvrtc> {
    if Config::get().nvrtc.is_none() {
        // Not eprintln, which the test harness captures.
        let _ = writeln!(std::io::stderr(), "skipped: SYMM_NVRTC_PATH is not set");
        return None;
    }
    Some(nvrtc().expect("SYMM_NVRTC_PATH is the library, or its folder"))
}

fn compile(nvrtc: &Nvrtc, text: &str, further: &[&str]) -> Result<Compiled> {
    let options: Vec<String> = OPTIONS.iter().chain(further).map(ToString::to_string).collect();
    nvrtc.compile("tiny.cu", text, HEADERS, &options)
}

#[test]
fn a_program_becomes_machine_code() {
    let Some(nvrtc) = compiler() else { return };
    assert!(
        nvrtc.version() >= (11, 2) && nvrtc.path().is_absolute(),
        "{:?} at {:?}",
        nvrtc.version(),
        nvrtc.path()
    );
    let compiled = compile(nvrtc, TINY, &["--ptxas-options=-v"]).expect("it compiles");
    assert_eq!(compiled.cubin[..4], *b"\x7fELF");
    assert!(compiled.log.contains("0 bytes spill stores"), "{}", compiled.log);
}

#[test]
fn threads_compile_at_once() {
    let Some(nvrtc) = compiler() else { return };
    let cubins: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| compile(nvrtc, TINY, &[]).expect("it compiles").cubin))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(cubins.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn a_wrong_program_is_shown_with_its_line_and_the_options() {
    let Some(nvrtc) = compiler() else { return };
    let error =
        compile(nvrtc, &TINY.replace("RANK", "NOTHING"), &[]).err().expect("a name nobody knows");
    assert_eq!(error.kind, crate::error::ErrorKind::Internal);
    for part in ["tiny.cu(3)", "NOTHING", "--gpu-architecture=sm_90", "-DSYMM_WORLD=2"] {
        assert!(error.message.contains(part), "{part} is not in: {error}");
    }
    assert!(error.message.lines().count() <= LOG_LINES);
}

#[test]
fn an_architecture_it_does_not_know_is_a_matter_of_configuration() {
    let Some(nvrtc) = compiler() else { return };
    let error = nvrtc
        .compile("tiny.cu", TINY, HEADERS, &["--gpu-architecture=sm_999".into()])
        .err()
        .expect("no such device");
    error.assert_says(crate::error::ErrorKind::Config, &["sm_999"]);
}

#[test]
fn the_folders_of_the_caller_are_searched_in_their_order() {
    let Some(nvrtc) = compiler() else { return };
    let folder = nvrtc.path().parent().expect("a folder");
    search_in(vec!["/nowhere".into(), folder.into()]);
    let found = search().expect("it is in the second");
    assert_eq!((found.path(), found.version()), (nvrtc.path(), nvrtc.version()));
    compile(&found, TINY, &[]).expect("opened twice, it serves both");
}

#[test]
fn an_unknown_path_is_named() {
    let error = Nvrtc::open(OsStr::new("/nowhere/libnvrtc.so.13"), 0).err().expect("no such file");
    error.assert_says(crate::error::ErrorKind::Config, &["/nowhere/libnvrtc.so.13"]);
    assert!(in_folder(Path::new("/nowhere")).is_none());
}

#[test]
fn a_library_of_another_kind_is_refused() {
    let error = Nvrtc::open(OsStr::new("libc.so.6"), 0).err().expect("not a compiler");
    assert!(error.message.contains("nvrtcVersion"), "{error}");
}
