//! A log with records of every kind, and its content.

use symm::error::Result;
use symm::store::Store;
use symm::store::file::FileStore;
use symm::store::memory::MemoryStore;
use symm::store::request::{Request, StoreOp};
use symm::store::table::TableReply;

/// A number of users so large that the file is not removed when users leave.
pub(crate) const MANY: u32 = 100;

const QUEUE: &str = "queue";

/// Changes of every kind.
pub(crate) fn program(store: &dyn Store) -> Result<()> {
    store.set("a", b"first")?;
    store.set("a", b"second")?;
    store.add("n", 5)?;
    store.add("n", -7)?;
    store.append("a", b" and more")?;
    store.queue_push(QUEUE, b"x")?;
    store.queue_push(QUEUE, b"y")?;
    store.queue_pop(QUEUE, None)?;
    store.compare_set("c", b"", b"v")?;
    store.compare_set("c", b"other", b"lost")?;
    store.multi_set(&["d", "e", "f"], &[b"1", b"", &[0xff; 40]])?;
    store.delete("e")?;
    store.add("n", 0)?;
    store.set("last", b"acknowledged")
}

/// The bytes of a file on which `program` was run.
pub(crate) fn log_of(program: impl Fn(&dyn Store) -> Result<()>) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    program(&FileStore::open(&path, MANY).unwrap()).unwrap();
    std::fs::read(path).unwrap()
}

/// The complete content of the store behind `ask`: keys with their values, and the queue, which is
/// emptied.
pub(crate) fn contents(
    ask: &mut dyn FnMut(&Request<'_>) -> Result<TableReply>,
) -> Vec<(String, Vec<u8>)> {
    let TableReply::Keys(mut keys) = ask(&Request::new(StoreOp::ListKeys, vec![], vec![])).unwrap()
    else {
        panic!("keys")
    };
    keys.sort();
    let mut all = Vec::new();
    for key in keys {
        let TableReply::Value(value) =
            ask(&Request::new(StoreOp::Get, vec![&key], vec![])).unwrap()
        else {
            panic!("a value")
        };
        all.push((key, value.to_vec()));
    }
    while let Ok(TableReply::Value(value)) =
        ask(&Request::new(StoreOp::TryPop, vec![QUEUE], vec![]))
    {
        all.push((QUEUE.into(), value.to_vec()));
    }
    all
}

/// The complete content of `store`, whose queue is emptied.
pub(crate) fn contents_of(store: &dyn Store) -> Vec<(String, Vec<u8>)> {
    contents(&mut |request| store.call(request, None))
}

/// The content after [`program`].
pub(crate) fn expected() -> Vec<(String, Vec<u8>)> {
    let store = MemoryStore::new();
    program(&store).unwrap();
    contents_of(&store)
}
