use super::*;

fn parse(pairs: &[(&str, &str)]) -> (Config, usize) {
    let (config, complaints) = Config::parse(|name| {
        pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    });
    (config, complaints.len())
}

#[test]
fn defaults_stand_where_nothing_is_set() {
    let (config, complaints) = parse(&[("SYMM_LOG", " ")]);
    let expected = Config {
        log: "warn".into(),
        restart: "0".into(),
        spin: None,
        cpu_threads: None,
        cma: true,
        store_bytes: None,
        workspace_mb: 512,
        p2p: true,
        one_gpu_queue: false,
        shared_gpus: false,
        cuda_tuning: String::new(),
        profile: ProfileChoice::Search,
        nvrtc: None,
        cache_dir: CacheDir::Unknown,
        topology_file: None,
        blocking_wait: false,
        debug_call_site: false,
        inter_node: "auto".into(),
        order: SumOrder::Rank,
        ctas: CtaOptions::default(),
        replace_gloo: false,
        vllm: String::new(),
        sglang: false,
        gloo_interface: None,
        rank: None,
        stats_seconds: 0,
        test_node: String::new(),
        trace_dir: None,
        temporary: "/tmp".into(),
        gloo_lazy: false,
    };
    assert_eq!((config, complaints), (expected, 0));
}

#[test]
fn settings_in_force_are_a_sentence() {
    let said = |pairs: &[(&str, &str)]| {
        let lookup = |name: &str| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        in_force(lookup, &Config::parse(lookup).1)
    };
    assert_eq!(said(&[("SYMM_SPIN", " ")]), "all settings have their defaults");
    let expected = "settings: SYMM_LOG=info, SYMM_SPIN=3; all others have their defaults";
    assert_eq!(
        said(&[("SYMM_SPIN", " 3"), ("SYMM_LOG", "info"), ("SYMM_CMA", "perhaps")]),
        expected
    );
}

#[test]
fn values_are_taken_and_bad_ones_complained_about() {
    type Change = fn(&mut Config);
    let settings: [(&str, &str, Change); 27] = [
        ("SYMM_LOG", "debug", |c| c.log = "debug".into()),
        ("TORCHELASTIC_RESTART_COUNT", "3", |c| c.restart = "3".into()),
        ("SYMM_SPIN", "200", |c| c.spin = Some(200)),
        ("SYMM_CPU_THREADS", "2", |c| c.cpu_threads = Some(2)),
        ("SYMM_CMA", "0", |c| c.cma = false),
        ("SYMM_STORE_MAX_BYTES", "4096", |c| c.store_bytes = Some(4096)),
        ("SYMM_NVRTC_PATH", "/opt/nvrtc.so", |c| c.nvrtc = Some("/opt/nvrtc.so".into())),
        ("SYMM_CACHE_DIR", "/kernels", |c| c.cache_dir = CacheDir::At("/kernels".into())),
        ("SYMM_WORKSPACE_MB", "64", |c| c.workspace_mb = 64),
        ("SYMM_P2P", "0", |c| c.p2p = false),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", |c| c.one_gpu_queue = true),
        ("SYMM_ALLOW_SHARED_GPUS", "1", |c| c.shared_gpus = true),
        ("SYMM_CUDA_TUNING", "lanes=8", |c| c.cuda_tuning = "lanes=8".into()),
        ("SYMM_COST_PROFILE", "/p.json", |c| c.profile = ProfileChoice::At("/p.json".into())),
        ("SYMM_TOPOLOGY_FILE", "/t.json", |c| c.topology_file = Some("/t.json".into())),
        ("SYMM_BLOCKING_WAIT", "1", |c| c.blocking_wait = true),
        ("SYMM_DEBUG", "call_site", |c| c.debug_call_site = true),
        ("RANK", "7", |c| c.rank = Some(7)),
        ("SYMM_STATS_INTERVAL", "5", |c| c.stats_seconds = 5),
        ("SYMM_TRACE_DIR", "/traces", |c| c.trace_dir = Some("/traces".into())),
        ("SYMM_REPLACE_GLOO", "1", |c| c.replace_gloo = true),
        ("SYMM_ORDER", "tree", |c| c.order = SumOrder::Tree),
        ("SYMM_CTA_POLICY", "zero", |c| c.ctas.policy = CtaPolicy::Zero),
        ("SYMM_MAX_CTAS", "16", |c| c.ctas.most = Some(16)),
        ("SYMM_VLLM", "unfused", |c| c.vllm = "unfused".into()),
        ("SYMM_SGLANG", "1", |c| c.sglang = true),
        ("TMPDIR", "/scratch", |c| c.temporary = "/scratch".into()),
    ];
    for (name, value, change) in settings {
        let (mut expected, _) = parse(&[]);
        change(&mut expected);
        assert_eq!(parse(&[(name, value)]), (expected, 0), "{name}");
    }
    assert_eq!(parse(&[("SYMM_COST_PROFILE", "0")]).0.profile, ProfileChoice::Off);
    for (words, expected) in [
        ("", (false, 0)),
        ("call_site", (true, 0)),
        (" call_site, sight,", (true, 1)),
        ("all", (false, 1)),
    ] {
        let (config, complaints) = parse(&[("SYMM_DEBUG", words)]);
        assert_eq!((config.debug_call_site, complaints), expected, "{words}");
    }
    let (config, complaints) = parse(&[
        ("SYMM_SPIN", "-1"),
        ("SYMM_CMA", "no"),
        ("SYMM_STORE_MAX_BYTES", "1G"),
        ("SYMM_TRACE_DIR", "here"),
        ("SYMM_REPLACE_GLOO", "nccl"),
        ("SYMM_ORDER", "pairs"),
        ("SYMM_CTA_POLICY", "none"),
        ("SYMM_VLLM", "yes"),
        ("SYMM_SGLANG", "on"),
    ]);
    assert_eq!(
        (config.spin, config.cma, config.store_bytes, config.trace_dir, complaints),
        (None, true, None, None, 9)
    );
}

#[test]
fn numbers_out_of_range_are_complained_about_and_ignored() {
    for (name, least, most) in [
        ("SYMM_SPIN", 0, 4_294_967_295),
        ("SYMM_CPU_THREADS", 1, 64),
        ("SYMM_MAX_CTAS", 1, 4_294_967_295),
        ("SYMM_STORE_MAX_BYTES", 4096, 1 << 50),
        ("SYMM_WORKSPACE_MB", 1, 1_048_576),
        ("SYMM_STATS_INTERVAL", 0, 1_000_000),
    ] {
        let parse = |value: i64| Config::parse(|key| (key == name).then(|| value.to_string()));
        for value in [least, most] {
            assert_eq!(parse(value).1, [""; 0], "{name}={value}");
        }
        for value in [least - 1, most + 1] {
            let expected =
                format!("{name}=\"{value}\" is not a whole number from {least} to {most}; ignored");
            assert_eq!(parse(value), (Config::parse(|_| None).0, vec![expected]));
        }
    }
}

#[test]
fn unknown_levels_of_the_log_are_complained_about() {
    for usable in
        ["info", "OFF", "symm::bootstrap=debug", "warn,symm::p2p=trace", "symm", "debug/knock"]
    {
        let (config, complaints) = parse(&[("SYMM_LOG", usable)]);
        assert_eq!((config.log.as_str(), complaints), (usable, 0));
    }
    for unusable in ["verbose", "2", "symm=loud", "warn,everything", "WARNING"] {
        let (config, complaints) = parse(&[("SYMM_LOG", unusable)]);
        assert_eq!((config.log.as_str(), complaints), ("warn", 1), "{unusable}");
    }
}

#[test]
fn misspelt_settings_are_told_which_was_meant() {
    let message = misspelt("SYMM_BLOCKING_WAITS").expect("no setting");
    assert!(message.ends_with("did you mean SYMM_BLOCKING_WAIT?"), "{message}");
    assert!(misspelt("SYMM_LOGS").expect("no setting").ends_with("did you mean SYMM_LOG?"));
    assert!(
        misspelt("SYMM_TRANSPORT_LAYER")
            .expect("no setting")
            .contains("known settings: SYMM_ALLOW_SHARED_GPUS, SYMM_BLOCKING_WAIT")
    );
    for fine in
        ["SYMM_LOG", "SYMM_JOB_SECRET", "SYMM_TEST_WORLDS", "SYMM_PYTHON", "TORCH_SYMMMEM", "PATH"]
    {
        assert_eq!(misspelt(fine), None);
    }
}

#[test]
fn the_list_of_names_is_what_parse_reads() {
    let read = std::cell::RefCell::new(Vec::new());
    Config::parse(|name| {
        read.borrow_mut().push(name.to_owned());
        None
    });
    let mut read: Vec<String> =
        read.into_inner().into_iter().filter(|name| name.starts_with("SYMM_")).collect();
    read.sort();
    read.dedup();
    assert_eq!(read, SETTINGS);
}

#[test]
fn the_cache_is_where_the_user_keeps_caches() {
    let at = |path: &str| CacheDir::At(path.into());
    for (pairs, expected, complaints) in [
        (&[("XDG_CACHE_HOME", "/caches"), ("HOME", "/home/a")][..], at("/caches/torch_symm"), 0),
        (&[("HOME", "/home/a")], at("/home/a/.cache/torch_symm"), 0),
        (&[("XDG_CACHE_HOME", "caches"), ("HOME", "/home/a")], at("/home/a/.cache/torch_symm"), 0),
        (&[("HOME", "a")], CacheDir::Unknown, 0),
        (&[("SYMM_CACHE_DIR", "0"), ("HOME", "/home/a")], CacheDir::Off, 0),
        (&[("SYMM_CACHE_DIR", ""), ("HOME", "/home/a")], at("/home/a/.cache/torch_symm"), 0),
        (&[("SYMM_CACHE_DIR", "here"), ("HOME", "/home/a")], at("/home/a/.cache/torch_symm"), 1),
    ] {
        let (config, found) = parse(pairs);
        assert_eq!((config.cache_dir, found), (expected, complaints), "{pairs:?}");
    }
}
