use super::*;
use crate::error::ErrorKind;
use proptest::prelude::*;
use serde_json::{Value, json};

/// A change to a valid profile.
type Change = fn(&mut Value);

fn hardware(ranks: usize) -> Value {
    json!({"device": "cpu", "name": "EPYC", "cores": 4, "link": "shared memory", "ranks": ranks})
}

fn right() -> Value {
    json!({
        "format": FORMAT,
        "version": VERSION,
        "measured": {
            "date": "2026-11-21", "software": "torch 2.11", "command": "tune", "load": [0.1]
        },
        "hardware": hardware(4),
        "local": {"step_us": 50.0, "slice_us": 20.0, "copy_gb_per_s": 10.0},
        "groups": [{
            "ranks": 4,
            "stream_bytes": 1000,
            "curves": [
                {"op": "all_reduce", "algorithm": "inline",
                    "bytes": [1024, 4096], "us": [4.0, 5.0]},
                {"op": "all_reduce", "algorithm": "staged",
                    "bytes": [8192, 65536], "us": [7.0, 14.0]},
            ],
        }],
    })
}

fn parse(value: &Value) -> Result<Profile> {
    Profile::parse(value.to_string().as_bytes())
}

/// Returns the error of parsing the valid profile after `change`.
fn refused(change: impl Fn(&mut Value)) -> String {
    let mut value = right();
    change(&mut value);
    parse(&value).expect_err("it is faulty").message
}

#[test]
fn a_profile_is_read_and_written() {
    let profile = parse(&right()).expect("right");
    assert_eq!(
        profile.group(4).map(|group| (group.thresholds().stream_bytes, group.curves.len())),
        Some((1000, 2))
    );
    assert_eq!(profile.group(2), None);
    let again =
        Profile::parse(&serde_json::to_vec(&profile).expect("written")).expect("read again");
    assert_eq!(again, profile);
}

#[test]
fn the_algorithm_chooses_the_curve() {
    let profile = parse(&right()).expect("right");
    let us = |algorithm: &str, bytes: f64| {
        profile.group(4).and_then(|group| group.us(Collective::AllReduce, algorithm, bytes))
    };
    assert_eq!(us("inline", 4096.0), Some(5.0));
    assert_eq!(us("staged", 8192.0), Some(7.0));
    // Beyond its last point the inline curve continues with its last segment.
    assert_eq!(us("inline", 7168.0), Some(6.0));
    // `one_shot` was never measured, so the curve with measured sizes nearest to the size applies.
    assert_eq!(
        (us("one_shot", 2048.0), us("one_shot", 65536.0)),
        (Some(4.0 + 1.0 / 3.0), Some(14.0))
    );
    assert_eq!(
        profile.group(4).and_then(|group| group.us(Collective::Broadcast, "inline", 1.0)),
        None
    );
}

#[test]
fn faults_are_sentences() {
    let cases: [(&str, Change); 18] = [
        ("it is not a profile: its \"format\" is not \"torch_symm profile\"", |v| {
            v["format"] = json!("bench")
        }),
        ("its version is 2, this torch_symm reads 1", |v| v["version"] = json!(2)),
        ("its version is -1, this torch_symm reads 1", |v| v["version"] = json!(-1)),
        ("it has no version; this torch_symm reads 1", |v| {
            drop(v.as_object_mut().map(|o| o.remove("version")))
        }),
        ("missing field `hardware`", |v| drop(v.as_object_mut().map(|o| o.remove("hardware")))),
        ("missing field `us`", |v| {
            drop(v["groups"][0]["curves"][0].as_object_mut().map(|o| o.remove("us")))
        }),
        ("unknown field `speed`", |v| v["hardware"]["speed"] = json!(1)),
        ("a job of 1 ranks; from 2 to 128 are possible", |v| v["hardware"]["ranks"] = json!(1)),
        ("a group of 8 ranks in a job of 4", |v| v["groups"][0]["ranks"] = json!(8)),
        ("local: slice_us is -1; it must be above 0 and at most 1000000000", |v| {
            v["local"]["slice_us"] = json!(-1.0)
        }),
        ("missing field `step_us`", |v| {
            drop(v["local"].as_object_mut().map(|o| o.remove("step_us")))
        }),
        ("it has no groups", |v| v["groups"] = json!([])),
        ("two entries for groups of 4 ranks", |v| {
            v["groups"] = json!([v["groups"][0], v["groups"][0]])
        }),
        ("groups of 4 ranks: \"sum\" is no collective", |v| {
            v["groups"][0]["curves"][0]["op"] = json!("sum")
        }),
        ("groups of 4 ranks: two curves of all_reduce by staged", |v| {
            v["groups"][0]["curves"][0]["algorithm"] = json!("staged");
        }),
        (
            "groups of 4 ranks: all_reduce by inline: 1024 bytes come after 4096; \
             sizes must ascend",
            |v| {
                v["groups"][0]["curves"][0]["bytes"] = json!([4096, 1024]);
            },
        ),
        ("groups of 4 ranks: stream_bytes is 0; from 1 to 1125899906842624 are possible", |v| {
            v["groups"][0]["stream_bytes"] = json!(0)
        }),
        ("groups of 4 ranks: cuda_tuning: \"speed\" is no name of a setting", |v| {
            v["groups"][0]["cuda_tuning"] = json!("speed=1")
        }),
    ];
    for (expected, change) in cases {
        let message = refused(change);
        assert!(message.starts_with(expected), "{message:?} is not {expected:?}");
    }
    let of = |text: &str| Profile::parse(text.as_bytes()).expect_err("faulty").message;
    assert!(of("{").starts_with("EOF while parsing"));
    assert!(
        of(&right().to_string().replace("[4.0,5.0]", "[1e999,5.0]"))
            .contains("number out of range")
    );
    assert!(of(&right().to_string().replace("[1024,4096]", "[-1,4096]")).contains("expected u64"));
    assert_eq!(of(&" ".repeat(5 << 20)), "it is longer than 4194304 bytes");
}

#[test]
fn files_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mine.json");
    let error = Profile::load(&path).expect_err("it is not there");
    error.assert_says(ErrorKind::Config, &["mine.json"]);
    let error = Profile::load(folder.path()).expect_err("a folder");
    assert!(error.message.ends_with("it is not a regular file"), "{error}");
    std::fs::write(&path, "{}").expect("written");
    let error = Profile::load(&path).expect_err("empty");
    assert!(error.message.contains("mine.json: it is not a profile"), "{error}");
    std::fs::write(&path, right().to_string()).expect("written");
    let profile = Profile::load(&path).expect("right");
    let other: Hardware = serde_json::from_value(hardware(2)).expect("hardware");
    let error = accept(profile.clone(), &path, &other).expect_err("other hardware");
    let message = "was measured with 4 ranks on 4 cores of EPYC, shared memory; here there are 2 \
        ranks on 4 cores of EPYC, shared memory";
    error.assert_says(ErrorKind::Config, &[message]);
    assert!(accept(profile.clone(), &path, &profile.hardware).is_ok());
}

#[test]
fn the_profiles_of_the_package_are_right_and_in_their_place() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/torch_symm/profiles");
    let mut found = 0;
    for entry in std::fs::read_dir(folder).expect("the folder is part of the repository") {
        let path = entry.expect("an entry").path();
        let profile = Profile::load(&path).expect("a profile");
        assert_eq!(
            path.file_name().and_then(|name| name.to_str()),
            Some(profile.hardware.file_name().as_str())
        );
        let measured = profile
            .groups
            .iter()
            .flat_map(|group| &group.curves)
            .map(|curve| curve.bytes.len())
            .sum::<usize>();
        assert!(measured >= 100, "{}: {measured} points", path.display());
        found += 1;
    }
    assert!(found > 0, "the package has profiles");
}

proptest! {
    #[test]
    fn bytes_never_panic(text in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Profile::parse(&text);
    }

    #[test]
    fn what_looks_right_never_panics(
        bytes in prop::collection::vec(any::<i64>(), 0..5),
        us in prop::collection::vec(any::<f64>(), 0..5),
        ranks in any::<u32>(),
    ) {
        let mut value = right();
        value["groups"][0]["ranks"] = json!(ranks);
        value["groups"][0]["curves"][0]["bytes"] = json!(bytes);
        value["groups"][0]["curves"][0]["us"] = json!(us);
        if let Ok(profile) = parse(&value) {
            let us = profile.groups[0].us(Collective::AllReduce, "inline", 1e6);
            prop_assert!(us.is_some_and(f64::is_finite));
        }
    }
}

#[test]
fn only_a_named_profile_of_the_same_device_gives_the_size_of_the_job() {
    let named = parse(&right()).expect("right").hardware;
    assert_eq!(job_ranks(Some(&named), DeviceKind::Cpu, 2), 4);
    assert_eq!(job_ranks(Some(&named), DeviceKind::Cuda, 2), 2);
    assert_eq!(job_ranks(Some(&named), DeviceKind::Cpu, 6), 6);
    assert_eq!(job_ranks(None, DeviceKind::Cpu, 2), 2);
}
