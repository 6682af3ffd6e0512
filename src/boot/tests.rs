use super::*;
use crate::error::Kind;
use crate::mem::shm::Segment;
use crate::store::memory::MemoryStore;

fn spec(group: &str, rank: u32, size: usize, timeout: Duration) -> JoinSpec<'_> {
    JoinSpec { group, rank: Rank(rank), size, restart: "0", timeout, segment_bytes: 8192 }
}

const SOON: Duration = Duration::from_millis(600);
const LATER: Duration = Duration::from_secs(20);

/// Lets the given ranks join in threads.
fn join_all(store: &MemoryStore, group: &str, ranks: &[u32], size: usize, timeout: Duration) -> Vec<Result<Joined>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|&rank| scope.spawn(move || join(store, &spec(group, rank, size, timeout)))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fn record(rank: u32, change: impl FnOnce(&mut Record)) -> Vec<u8> {
    let mut record = Record::new(&spec("g", rank, 2, SOON), "").expect("record");
    change(&mut record);
    record.encode()
}

#[test]
fn members_share_one_memory_and_leave_no_key() {
    for size in 2..=8 {
        let store = MemoryStore::default();
        let ranks: Vec<u32> = (0..size as u32).collect();
        let joined: Vec<Joined> = join_all(&store, "g", &ranks, size, LATER).into_iter().map(|j| j.expect("join")).collect();
        assert!(store.is_empty(), "keys are left");
        let maps: Vec<Segment> = joined
            .into_iter()
            .map(|joined| {
                assert_eq!(joined.members.len(), size);
                assert!(joined.members.iter().all(|member| member.process.0 == std::process::id() && member.handle.is_none()));
                Segment::map(joined.segment, 8192).expect("map")
            })
            .collect();
        // SAFETY: both pages are mapped; nobody else writes them.
        unsafe {
            maps[0].ptr(100, 1).write_volatile(42);
            assert!(maps.iter().all(|map| map.ptr(100, 1).read_volatile() == 42));
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_by_everybody() {
    let store = MemoryStore::default();
    for outcome in join_all(&store, "g", &[0, 2], 4, SOON) {
        let error = outcome.expect_err("two are missing");
        assert_eq!(error.kind, Kind::Timeout);
        assert!(error.message.contains("ranks 1 and 3") && error.message.contains("\"g\" of 4"), "{error}");
    }
    assert!(store.is_empty(), "keys are left");
}

#[test]
fn a_duplicate_rank_is_refused_by_pid() {
    let store = MemoryStore::default();
    let outcomes = join_all(&store, "g", &[1, 1], 2, SOON);
    let errors: Vec<Error> = outcomes.into_iter().map(|outcome| outcome.expect_err("nobody is rank 0")).collect();
    let twin = errors.iter().find(|error| error.kind == Kind::Config).expect("one of the two is refused");
    assert!(twin.message.contains("rank 1 of group \"g\" is taken"), "{twin}");
    assert!(errors.iter().any(|error| error.kind == Kind::Timeout), "{errors:?}");
}

#[test]
fn other_versions_hosts_and_users_are_refused() {
    type Change = Box<dyn FnOnce(&mut Record)>;
    let cases: [(Change, &str); 4] = [
        (Box::new(|r| r.version = "9.9.9".into()), "rank 1 of group \"g\" run torch-symm 9.9.9"),
        (Box::new(|r| r.host = "elsewhere".into()), "rank 1 of group \"g\" run on another host"),
        (Box::new(|r| r.uid += 1), "run as user"),
        (Box::new(|r| r.size = 3), "count 3 members"),
    ];
    for (change, text) in cases {
        let store = MemoryStore::default();
        store.compare_set("symm/g/0/1", b"", &record(1, change)).expect("set");
        let error = join(&store, &spec("g", 0, 2, LATER)).expect_err("refused");
        assert_eq!(error.kind, Kind::Config);
        assert!(error.message.contains(text), "{error}");
    }
}

#[test]
fn what_a_dead_process_left_is_overwritten() {
    let store = MemoryStore::default();
    for rank in 0..2 {
        let left = record(rank, |r| {
            r.start_time += 1;
            r.socket = "symm-nobody".into();
        });
        store.compare_set(&format!("symm/g/0/{rank}"), b"", &left).expect("set");
    }
    for outcome in join_all(&store, "g", &[0, 1], 2, LATER) {
        outcome.expect("join");
    }
}

#[test]
fn strangers_do_not_delay_a_join() {
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| join(&store, &spec("g", 0, 2, LATER)));
        let key = ["symm/g/0/0".to_string()];
        assert!(store.wait(&key, LATER).expect("wait"));
        let leader_record = Record::decode(&store.multi_get(&key).expect("get")[0]).expect("record");
        // One says nothing, one has the wrong token.
        let member = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            join(&store, &spec("g", 1, 2, LATER))
        });
        assert!(store.wait(&["symm/g/0/1".to_string()], LATER).expect("wait"));
        let _silent = message::connect(&leader_record.socket).expect("connect").expect("listening");
        let liar = message::connect(&leader_record.socket).expect("connect");
        if let Some(liar) = &liar {
            let greeting = message::Greeting {
                purpose: "join".into(),
                token: "guess".into(),
                rank: 1,
                size: 2,
                segment_bytes: 8192,
                pid: 1,
                start_time: 1,
                failure: None,
            };
            let _ = message::send(liar, &greeting, &[]);
        }
        leader.join().expect("no panic").expect("leader");
        member.join().expect("no panic").expect("member");
    });
}

#[test]
fn joins_leave_no_descriptor() {
    let store = MemoryStore::default();
    join_all(&store, "warm", &[0, 1, 2], 3, LATER);
    let before = descriptors();
    for round in 0..100 {
        let outcomes = join_all(&store, "g", &[0, 1, 2], 3, LATER);
        assert!(outcomes.iter().all(Result::is_ok), "round {round}: {outcomes:?}");
    }
    join_all(&store, "g", &[0, 1], 3, Duration::from_millis(100));
    // Other tests of this process open and close some of their own.
    assert!(descriptors() < before + 50, "{} descriptors, {before} before", descriptors());
}
