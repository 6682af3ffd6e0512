//! Tests that need a separate process, and processes that are part of a test: each runs the test
//! program again.
#![allow(dead_code, reason = "each program uses its part")]

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::process::{Command, Stdio};

const ALONE: &str = "SYMM_TEST_ALONE";
const ROLE: &str = "SYMM_TEST_ROLE";

fn program(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a program has a path"));
    command.args(["--exact", test]);
    command
}

/// Returns true in a process that runs only the calling test. In any other process it starts that
/// process, waits for its success and returns false.
///
/// A test that counts its process's resources, changes its process's limits or forks it would
/// disturb other tests.
pub(crate) fn alone() -> bool {
    let thread = std::thread::current();
    let test = thread.name().expect("the harness names each thread after its test");
    if std::env::var(ALONE).is_ok_and(|running| running == test) {
        return true;
    }
    // Passes stderr through, because a test may write lines to it that bypass the harness.
    let output = program(test)
        .env(ALONE, test)
        .stderr(Stdio::inherit())
        .output()
        .expect("this program starts again");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && told.contains(" 1 passed;"),
        "{test} in a process of its own: {}\n{told}",
        output.status
    );
    false
}

/// A process that runs `test`, which is otherwise ignored, with `role`.
pub(crate) fn process(test: &str, role: &impl Serialize) -> Command {
    let mut command = program(test);
    command
        .args(["--ignored", "--nocapture"])
        .env(ROLE, serde_json::to_string(role).expect("a role is plain data"));
    command
}

/// Returns the role of this process, if [`process`] started it.
pub(crate) fn role<T: DeserializeOwned>() -> Option<T> {
    std::env::var(ROLE).ok().map(|role| serde_json::from_str(&role).expect("written by `process`"))
}

/// Forks a child that runs `body` and exits with its result.
pub(crate) fn fork(body: impl FnOnce() -> i32) -> libc::pid_t {
    // SAFETY: tests call it in a process of their own. The child runs only `body`, which may
    // allocate, because glibc repairs malloc in a child, and `_exit`, which takes any code.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(body());
        }
        child
    }
}

/// Waits for a child of [`fork`]; returns its status, which is 0 if it has exited with 0.
pub(crate) fn status_of(child: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is valid for a write; `child` is a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}
