//! A store's log: no bytes may make its reader panic or allocate more than a small multiple of the
//! log. Checksums count as correct here. The first 28 bytes, which identify a log, are real; the
//! fuzzer makes the rest.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;
use symm::store::Store;
use symm::store::file::FileStore;
use symm::store::file::log::Replica;

static BEGINNING: OnceLock<Vec<u8>> = OnceLock::new();

fn beginning() -> Vec<u8> {
    let path = std::env::temp_dir().join(format!("symm-fuzz-{}", std::process::id()));
    let store = FileStore::open(&path, 1).expect("opens");
    store.set("key", b"value").expect("set");
    let mut bytes = std::fs::read(&path).expect("reads");
    drop(store);
    bytes.truncate(28);
    bytes
}

fuzz_target!(|data: &[u8]| {
    let log = [BEGINNING.get_or_init(beginning), data].concat();
    if let Ok(replica) = Replica::load(&log[..]) {
        assert!(replica.table.bytes() <= 200 * log.len());
    }
});
