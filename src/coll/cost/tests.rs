use super::*;
use crate::topo::cost::LinkKind;
use profile::MeasuredOn;

fn mesh(ranks: &[usize]) -> Mesh {
    Mesh { device: DeviceKind::Cpu, ranks: ranks.to_vec(), job: 4, per_node: 4 }
}

fn profile() -> (Profile, PathBuf) {
    let hardware = Hardware {
        device: DeviceKind::Cpu,
        name: "EPYC".into(),
        cores: 4,
        link: "shared memory".into(),
        ranks: 4,
    };
    let curve = |op: &str, algorithm: &str, points: &[(u64, f64)]| {
        let (bytes, us) = points.iter().copied().unzip();
        curve::Curve { op: op.into(), algorithm: algorithm.into(), bytes, us }
    };
    let curves = vec![
        curve("all_reduce", "inline", &[(1024, 4.0), (8128, 6.0)]),
        curve("all_reduce", "staged", &[(8192, 9.0), (1 << 20, 70.0)]),
    ];
    let groups =
        vec![GroupTimes { ranks: 4, cuda_tuning: String::new(), stream_bytes: None, curves }];
    let measured = MeasuredOn {
        date: "2026-11-21".into(),
        software: String::new(),
        command: String::new(),
        load: vec![],
        reference_us: 81.0,
    };
    (
        Profile {
            format: profile::FORMAT.into(),
            version: profile::VERSION,
            measured,
            hardware,
            groups,
            local: None,
            inter_node: None,
        },
        "here.json".into(),
    )
}

/// The model of `mesh` by the profile.
fn measured(mesh: &Mesh) -> Model {
    Model::of_profile(mesh, None, profile()).expect("made")
}

/// The model of `mesh` by its links.
fn links(mesh: &Mesh) -> Model {
    Model::links(mesh, None).expect("made")
}

#[test]
fn a_measured_point_is_its_own_price() {
    let model = measured(&mesh(&[4]));
    assert_eq!(model.us("all_reduce", 1024.0, 0), Ok(4.0));
    assert_eq!(model.us("all_reduce", 1048576.0, 0), Ok(70.0));
    assert_eq!(model.algorithm("all_reduce", 1024.0, 0), Ok("inline"));
    assert_eq!(
        (model.basis("all_reduce", 0), model.basis("broadcast", 0)),
        (Ok(Basis::Measured), Ok(Basis::Links))
    );
    assert_eq!((model.reference_us(), model.local()), (81.0, None));
    assert!(
        model.origin().contains("2026-11-21") && model.origin().contains("here.json"),
        "{}",
        model.origin()
    );
}

#[test]
fn the_step_lies_where_the_plan_changes() {
    let model = measured(&mesh(&[4]));
    let last = (1..16384)
        .rev()
        .find(|&bytes| model.algorithm("all_reduce", f64::from(bytes), 0) == Ok("inline"))
        .expect("short ones");
    let (before, after) = (
        model.us("all_reduce", f64::from(last), 0),
        model.us("all_reduce", f64::from(last + 1), 0),
    );
    assert!(
        before.clone().expect("a price") < 6.1 && after.clone().expect("a price") > 8.9,
        "{before:?} {after:?} at {last}"
    );
}

#[test]
fn what_was_not_measured_is_estimated() {
    let model = measured(&mesh(&[4]));
    let by_links = links(&mesh(&[4]));
    assert_eq!(model.us("broadcast", 1e6, 0), by_links.us("broadcast", 1e6, 0));
    let split = measured(&mesh(&[2, 2]));
    assert_eq!(
        (split.basis("all_reduce", 0), by_links.basis("all_reduce", 0)),
        (Ok(Basis::Links), Ok(Basis::Links))
    );
    assert_eq!(split.us("all_reduce", 1e6, 1), links(&mesh(&[2, 2])).us("all_reduce", 1e6, 1));
}

#[test]
fn a_single_rank_pays_nothing_but_in_torchs_model() {
    let one = mesh(&[1]);
    assert_eq!(links(&one).us("all_gather", 1e6, 0), Ok(0.0));
    assert_eq!(Model::torch(&one, None).expect("made").us("all_gather", 1e6, 0), Ok(6.6));
}

#[test]
fn nodes_are_joined_by_the_network() {
    let model = links(&Mesh { per_node: 2, ..mesh(&[2, 2]) });
    let bandwidths: Vec<f64> = model.dim_links().map(|link| link.gb_per_s).collect();
    assert_eq!(
        bandwidths,
        [LinkKind::Sockets.link().gb_per_s, LinkKind::SharedMemory.link().gb_per_s]
    );
    assert_eq!(
        (model.algorithm("all_reduce", 1e6, 0), model.algorithm("all_reduce", 1e6, 1)),
        (Ok("two_level"), Ok("staged"))
    );
}

#[test]
fn what_was_measured_on_one_node_prices_no_network() {
    // Four nodes of four ranks: the groups along dimension 0 have one rank on each node, and four
    // share a node's network.
    let several = Mesh { per_node: 4, ..mesh(&[4, 4]) };
    let model = measured(&several);
    assert_eq!(
        (model.us("all_reduce", 1048576.0, 1), model.basis("all_reduce", 1)),
        (Ok(70.0), Ok(Basis::Measured))
    );
    let wire = 6.6 + 2.0 * 135.0 + 4.0 * 1.5 * 1048576.0 / 1250.0;
    assert_eq!(
        (model.us("all_reduce", 1048576.0, 0), model.basis("all_reduce", 0)),
        (Ok(wire), Ok(Basis::Links))
    );
    // One group on two nodes: the intra-node part is measured.
    let whole = measured(&Mesh { per_node: 4, ..mesh(&[8]) });
    assert_eq!(
        whole.us("all_reduce", 1048576.0, 0),
        Ok(70.0 + (6.6 + 2.0 * 135.0 + 1048576.0 / 1250.0))
    );
    let slow = LinkCost { gb_per_s: 0.125, us: 10.0 };
    let given = Model::of_profile(&Mesh { per_node: 4, ..mesh(&[8]) }, Some(vec![slow]), profile())
        .expect("made");
    assert_eq!(
        given.us("all_reduce", 1048576.0, 0),
        Ok(70.0 + (6.6 + 2.0 * 10.0 + 1048576.0 / 125.0))
    );
}

#[test]
fn wrong_questions_are_refused() {
    let model = links(&mesh(&[4]));
    for (op, bytes, dim, why) in [
        (
            "gather",
            1.0,
            0,
            "\"gather\" has no price; all_gather, all_reduce, reduce_scatter, all_to_all, \
             broadcast have one",
        ),
        ("all_gather", 1.0, 1, "mesh dimension 1 of 1"),
        ("all_gather", -1.0, 0, "-1 bytes cannot be moved"),
        ("all_gather", f64::NAN, 0, "NaN bytes cannot be moved"),
    ] {
        assert_eq!(model.us(op, bytes, dim).expect_err("wrong").message, why);
    }
    let link =
        |gb_per_s, us| Model::links(&mesh(&[4]), Some(vec![LinkCost { gb_per_s, us }])).is_ok();
    assert_eq!(
        [link(1.0, 0.0), link(0.0, 1.0), link(1.0, -1.0), link(f64::NAN, 1.0)],
        [true, false, false, false]
    );
    assert!(
        Model::links(&mesh(&[4]), Some(vec![])).is_err()
            && Model::links(&mesh(&[0]), None).is_err()
    );
}

#[test]
fn prices_grow_with_size() {
    for ranks in [2, 3, 4, 8] {
        for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
            let mesh = Mesh { device, ranks: vec![ranks], job: ranks, per_node: ranks };
            for model in [
                Model::torch(&mesh, None),
                Model::links(&mesh, Some(vec![LinkCost { gb_per_s: 10.0, us: 1.0 }])),
            ] {
                let model = model.expect("made");
                for op in ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast"]
                {
                    let price =
                        |shift: u32| model.us(op, f64::from(1u32 << shift), 0).expect("a price");
                    // The price need not grow from one power of two to the next: just above a
                    // threshold the other algorithm may be cheaper.
                    assert!(
                        (10..27).all(|shift| price(shift + 4) >= price(shift)),
                        "{op} {ranks} {device:?}"
                    );
                }
            }
        }
    }
}
