"""The data of a store: the operations of `torch.distributed.Store`, the same for every kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from stores import ALL, OWN, PROMPT, WHOLE, WORDS, Meeting, seconds

all_stores = pytest.mark.parametrize("kind", ALL)
whole_stores = pytest.mark.parametrize("kind", WHOLE)


@pytest.mark.parametrize("kind", [*PROMPT, "rust-torch-file"])
def test_a_value_reaches_every_user(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    one, two = meeting.open(), meeting.open()
    one.set("key", "value")
    assert two.get("key") == b"value"
    two.set("key", b"another")
    assert one.get("key") == b"another"
    assert one.check(["key"]) and not one.check(["key", "none"]) and not two.check(["none"])


@all_stores
@pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), "schlüssel".encode(), b"x" * 100_000])
def test_any_bytes_are_a_value(kind: str, value: bytes, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    store = meeting.open()
    store.set("key", value)
    assert meeting.open().get("key") == value
    assert store.compare_set("key", value, value + b"!") == value + b"!"
    assert store.multi_get(["key", "key"]) == [value + b"!"] * 2


@pytest.mark.parametrize("kind", OWN)
def test_a_long_value(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    value = bytes(range(256)) * (1 << 18)
    meeting.open().set("long", value)
    assert meeting.open().get("long") == value


@all_stores
@pytest.mark.parametrize("key", ["", "/", "a/b", "ключ", "with space", "k" * 1000])
def test_any_text_is_a_key(kind: str, key: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    store.set(key, "value")
    store.set(f"{key}.", "other")
    assert store.get(key) == b"value" and store.check([key])


@pytest.mark.parametrize("kind", OWN)
def test_what_is_no_text_is_no_key(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    with pytest.raises(ValueError, match="UTF-8"):
        store.set(b"\xff", "value")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 65536"):
        store.set("k" * 65_537, "value")
    assert store.num_keys() == 0


@all_stores
def test_compare_set(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "wrong", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.get("key") == b"second"
    # c10d: an absent key stays absent, and the expected value is returned.
    assert store.compare_set("absent", "expected", "value") == b"expected"
    assert not store.check(["absent"])


@all_stores
def test_add(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    one, two = meeting.open(), meeting.open()
    assert [one.add("sum", 1), two.add("sum", 41), one.add("sum", -50), two.add("sum", 0)] == [1, 42, -8, -8]
    assert one.get("sum") == b"-8"
    one.set("sum", "7")
    assert two.add("sum", 1 << 40) == (1 << 40) + 7


@pytest.mark.parametrize("kind", WORDS)
def test_add_to_text_harms_nobody(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    store.set("text", "seven")
    with pytest.raises(ValueError, match="not a number"):
        store.add("text", 1)
    store.set("large", str((1 << 63) - 1))
    with pytest.raises(ValueError, match="overflows"):
        store.add("large", 1)
    assert store.get("text") == b"seven" and store.add("large", 0) == (1 << 63) - 1


@pytest.mark.parametrize("kind", PROMPT)
def test_append(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    one, two = meeting.open(), meeting.open()
    one.append("key", "po")
    two.append("key", "po")
    one.append("key", "")
    two.append("key", b"\xff")
    assert one.get("key") == b"popo\xff"


@all_stores
def test_several_keys_at_once(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    one, two = meeting.open(), meeting.open()
    names = [f"key {i}" for i in range(1000)]
    one.multi_set(names, [f"value {i}" for i in range(1000)])
    two.wait(names)
    assert two.check(names)
    assert two.multi_get(names[::-1]) == [f"value {i}".encode() for i in reversed(range(1000))]
    assert two.multi_get([]) == []
    assert two.check([])


@pytest.mark.parametrize("kind", OWN)
def test_keys_and_values_must_be_as_many(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    for keys, values in ((["a", "b"], ["1"]), (["a"], []), ([], ["1"])):
        with pytest.raises(ValueError, match="MultiSet"):
            store.multi_set(keys, values)
    assert store.num_keys() == 0


@pytest.mark.parametrize("kind", PROMPT)
def test_delete(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    one, two = meeting.open(), meeting.open()
    one.set("key", "value")
    assert two.delete_key("key") and not one.delete_key("key")
    assert not one.check(["key"])
    assert one.compare_set("key", "", "again") == b"again"


@pytest.mark.parametrize("kind", WORDS)
def test_keys_are_counted_and_listed(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    one, two = meeting.open(), meeting.open()
    assert one.num_keys() == 0 and one.list_keys() == []
    names = ["a", "b/c", "", "ключ"]
    for name in names:
        one.set(name, "")
    one.queue_push("queue", "value")
    assert two.num_keys() == 4
    assert sorted(two.list_keys()) == sorted(names)
    two.delete_key("a")
    assert one.num_keys() == 3 and "a" not in one.list_keys()


@pytest.mark.parametrize("kind", OWN)
def test_prefixes_keep_apart(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    one, two = dist.PrefixStore("one", store), dist.PrefixStore("two", store)
    one.set("key", "1")
    two.set("key", "2")
    two.queue_push("key", "queued")
    assert (one.get("key"), two.get("key"), store.get("one/key")) == (b"1", b"2", b"1")
    assert one.list_keys() == ["key"] and store.num_keys() == 2
    assert (one.queue_len("key"), two.queue_len("key")) == (0, 1)
    inner = dist.PrefixStore("deep", one)
    inner.set("key", "3")
    assert one.get("deep/key") == b"3"
    assert type(inner.underlying_store.underlying_store) is type(store)


@pytest.mark.parametrize("kind", OWN)
def test_a_clone_is_the_same_store_with_a_timeout_of_its_own(kind: str, tmp_path: Path) -> None:
    import copy

    store = Meeting(kind, tmp_path).open()
    for other in (store.clone(), copy.copy(store), copy.deepcopy(store)):
        assert type(other) is type(store) and other.timeout == store.timeout and repr(other) == repr(store)
        other.set_timeout(seconds(3))
        other.set("key", "value")
        assert store.get("key") == b"value" and store.timeout == seconds(20)
        assert other.delete_key("key")


@whole_stores
def test_extended_api_is_offered(kind: str, tmp_path: Path) -> None:
    assert Meeting(kind, tmp_path).open().has_extended_api()


# proves P22
def test_what_a_store_of_torch_lacks_is_said(tmp_path: Path) -> None:
    store = Meeting("rust-torch-file", tmp_path).open()
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    with pytest.raises(NotImplementedError, match="append"):
        store.append("a", "1")
    with pytest.raises(NotImplementedError):
        store.queue_push("a", "1")
    with pytest.raises(NotImplementedError):
        store.queue_pop("a")
