"""The data of a store: the operations of `torch.distributed.Store`, the same for every kind of store."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch_symm
from stores import ALL, OWN, WORDS, Meeting, seconds

Step = tuple[str, tuple[Any, ...]]

#: Keys, and a value of each.
DATA = {
    "": b"",
    "/": b"\0",
    "a/b": bytes(range(256)) * 4096,
    "ключ": "schlüssel".encode(),
    "with space": b"value",
    "k" * 1000: b"\xff",
}


@pytest.mark.parametrize("kind", ALL)
def test_any_text_is_a_key_and_any_bytes_are_a_value(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    one, two = meeting.open(), meeting.open()
    for key, value in DATA.items():
        one.set(key, value)
        one.set(f"{key}.", "other")
        assert two.get(key) == value and one.check([key])
        assert two.compare_set(key, value, value + b"!") == value + b"!"
        assert one.multi_get([key, key]) == [value + b"!"] * 2
    names = [f"key {i}" for i in range(1000)]
    one.multi_set(names, [f"value {i}" for i in range(1000)])
    two.wait(names)
    assert two.check(names)
    assert two.multi_get(names[::-1]) == [f"value {i}".encode() for i in reversed(range(1000))]


KEYS = ["a", "b", "ключ", "", "d/e"]
VALUES = [b"", b"1", b"-20", b"text", b"\0\xff"]
AMOUNTS = [-50, -3, 0, 1, 4, 1 << 40]
NUMBER = re.compile(rb"(-?\d+)?")
COMMON = ("set", "compare_set", "add", "check", "multi_set", "get", "multi_get")
#: The operations that programs use on these stores. The others are missing, or differ from torch's HashStore.
SERVED = {
    "rust-torch-file": COMMON,
    "rust-torch-tcp": (*COMMON, "append", "delete_key", "queue_len", "queue_pop", "queue_push", "wait"),
}


def program(seed: int, length: int) -> list[Step]:
    """A list of calls of every operation, with few keys and values."""
    rng = random.Random(seed)
    steps: list[Step] = []
    for _ in range(length):
        key, value, other = rng.choice(KEYS), rng.choice(VALUES), rng.choice(VALUES)
        some = rng.sample(KEYS, rng.randrange(4))
        calls: list[Step] = [
            ("set", (key, value)),
            ("compare_set", (key, value, other)),
            ("add", (key, rng.choice(AMOUNTS))),
            ("append", (key, value)),
            ("check", (some,)),
            ("delete_key", (key,)),
            ("num_keys", ()),
            ("list_keys", ()),
            ("multi_set", (some, [rng.choice(VALUES) for _ in some])),
            ("queue_push", (key, value)),
            ("queue_pop", (key, False)),
            ("queue_len", (key,)),
            ("get", (key,)),
            ("multi_get", (some,)),
            ("wait", (some, seconds(0.001))),
        ]
        steps.append(rng.choice(calls))
    return steps


def outcome(store: dist.Store, step: Step) -> object:
    name, arguments = step
    try:
        result = getattr(store, name)(*arguments)
    except dist.QueueEmptyError:
        return "empty"
    except dist.DistStoreError:
        return "timeout"
    except (ValueError, RuntimeError):
        return "no number"
    return sorted(result) if name == "list_keys" else result


@pytest.mark.parametrize("kind", ALL)
def test_the_same_as_on_a_hash_store(kind: str, tmp_path: Path) -> None:
    for seed in range(3):
        place = tmp_path / str(seed)
        place.mkdir()
        meeting, model = Meeting(kind, place), dist.HashStore()
        # torch's TCPStore sends without waiting for a reply, so a second user may see a change late.
        users = [meeting.open() for _ in range(1 if kind == "rust-torch-tcp" else 2)]
        for number, step in enumerate(program(seed, 300)):
            name, arguments = step
            store, present = users[number % len(users)], model.list_keys()
            needed = arguments if name == "get" else arguments[0] if name == "multi_get" else ()
            # A call that would wait for a missing key is left out.
            if name not in SERVED.get(kind, (name,)) or not set(needed) <= set(present):
                continue
            old = model.get(arguments[0]) if name == "add" and arguments[0] in present else b"0"
            if not NUMBER.fullmatch(old):
                # torch accepts text that starts with a number; this package accepts only numbers.
                assert kind not in WORDS or outcome(store, step) == "no number"
            if not NUMBER.fullmatch(old) or (kind == "rust-torch-tcp" and not old):
                continue
            expected = outcome(model, step)
            assert outcome(store, step) == expected, f"seed {seed}, step {number}: {step}"
        for key in KEYS:
            assert users[-1].check([key]) == model.check([key]), key


@pytest.mark.parametrize("kind", WORDS)
def test_refused_calls_change_nothing(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    wrong: list[tuple[str, str, tuple[object, ...]]] = [
        ("UTF-8", "set", (b"\xff", "value")),
        ("at most 65536", "set", ("k" * 65_537, "value")),
        *(("MultiSet", "multi_set", both) for both in ((["a", "b"], ["1"]), (["a"], []), ([], ["1"]))),
        ("not a number", "add", ("text", 1)),
        ("overflows", "add", ("large", 1)),
    ]
    store.set("text", "seven")
    store.set("large", str((1 << 63) - 1))
    for words, name, arguments in wrong:
        with pytest.raises(ValueError, match=words):
            getattr(store, name)(*arguments)
    assert store.num_keys() == 2 and store.get("text") == b"seven" and store.add("large", 0) == (1 << 63) - 1


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
    store = Meeting(kind, tmp_path).open()
    assert isinstance(store, dist.Store) and isinstance(store, torch_symm._C.NativeStore)  # type: ignore[attr-defined]
    for other in (store.clone(), copy.copy(store), copy.deepcopy(store)):
        assert type(other) is type(store) and other.timeout == store.timeout and repr(other) == repr(store)
        other.set_timeout(seconds(3))
        other.set("key", "value")
        assert store.get("key") == b"value" and store.timeout == seconds(20)
        assert other.delete_key("key")


# proves P22
def test_what_a_store_of_torch_lacks_is_said(tmp_path: Path) -> None:
    store = Meeting("rust-torch-file", tmp_path).open()
    with pytest.raises(NotImplementedError, match="append"):
        store.append("a", "1")
    for call in (lambda: store.queue_push("a", "1"), lambda: store.queue_pop("a")):
        with pytest.raises(NotImplementedError):
            call()
