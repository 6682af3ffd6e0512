"""Reads dumps: JSON that may be truncated, or made by another user."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "torch-symm trace"
VERSION = 1
#: Maximum size of a dump that is read, in bytes; 2000 calls take less than 2 MiB.
LARGEST = 64 << 20


class NotADump(Exception):
    """Explains in a sentence why a file cannot be used."""


@dataclass(frozen=True, order=True)
class Series:
    """Collectives that are numbered together."""

    cuda: bool

    def __str__(self) -> str:
        return f"{'CUDA ' if self.cuda else ''}collective"


@dataclass(frozen=True)
class Call:
    """A recorded call; see ``docs/guide/trace.md``. ``sequence`` is ``None`` if the call did not start."""

    number: int
    op: str
    text: str
    sequence: int | None
    dtype: str
    elements: int
    itemsize: int
    peer: int | None
    #: True if the peer is on another node; ``peer`` is then its rank in the default group.
    internode: bool
    even: bool
    bytes_in: int
    bytes_out: int
    cuda: bool
    timeout_ms: int
    created_ns: int
    started_ns: int | None
    ended_ns: int | None
    state: str
    outcome: str | None
    #: The phase of a multi-node collective, now or when it failed, and the time when that phase started.
    phase: str | None
    phase_ns: int | None
    #: The algorithm; then how long the call waited, and for which rank, which is known only under a profiler.
    algorithm: str | None
    waited_ns: int | None
    waited_for: int | None

    @property
    def series(self) -> Series:
        return Series(self.cuda)

    @property
    def message(self) -> bool:
        return self.op in ("send", "recv")

    def size(self, world: int) -> int:
        """Bytes as nccl-tests counts them, among ``world`` ranks: the whole tensor that is gathered or divided."""
        size = self.elements * self.itemsize
        return size * world if self.op in ("gather", "scatter") and self.even else size


@dataclass(frozen=True)
class Member:
    rank: int
    global_rank: int
    pid: int


@dataclass(frozen=True)
class Peer:
    """A rank's knowledge about a member. ``launched`` counts CUDA calls, ``None`` if the rank used no GPU."""

    rank: int
    process: str | None
    begun: int
    launched: int | None
    absence: str | None


@dataclass(frozen=True)
class Failure:
    kind: str
    message: str
    seen_ns: int


@dataclass
class View:
    """A group as seen by one of its ranks. ``complete``: no call of the process had been overwritten."""

    key: tuple[str, int]
    name: str
    rank: int
    #: The ranks on this node, in order.
    members: list[Member]
    #: The group's ranks in the default group, on all nodes.
    global_ranks: list[int]
    #: The other nodes of the group, as messages name them.
    other_nodes: str | None
    joined_ns: int
    left_ns: int | None
    begun: int
    launched: int | None
    failure: Failure | None
    peers: list[Peer]
    written_ns: int
    complete: bool
    calls: list[Call] = field(default_factory=list)

    @property
    def world(self) -> int:
        """The group's number of ranks, on all nodes."""
        return len(self.global_ranks)

    @property
    def own(self) -> Member:
        return next(member for member in self.members if member.rank == self.rank)

    @property
    def global_rank(self) -> int:
        return self.own.global_rank

    @property
    def pid(self) -> int:
        return self.own.pid


@dataclass(frozen=True)
class Dump:
    host: str
    pid: int
    written_ns: int
    views: list[View]


def foreign(status: os.stat_result) -> str:
    """Returns why a file or directory with this status is not trusted, or nothing; see ``src/sys/owner_only.rs``."""
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        return f"belongs to user {status.st_uid}, this process to {user}"
    if status.st_mode & 0o022:
        return f"can be written by others (mode {status.st_mode & 0o7777:o}): chmod go-w makes it usable"
    return ""


def read(path: Path, private: bool = False) -> Dump:
    """Reads the dump in ``path``. With ``private``, rejects a file that other users could have made or changed.

    Raises:
        NotADump: it is not a dump, is of another version, ends too early, or is not private.
    """
    try:
        if private:
            return _parsed(_private(path), path)
        if not path.is_file():
            raise NotADump(f"{path}: there is no such file")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise NotADump(f"{path}: {error.strerror}") from error
    return _parsed(content, path)


def _private(path: Path) -> bytes:
    # Neither the directory nor the file may be a symbolic link, and the checks use the open descriptors.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path.parent, flags | os.O_DIRECTORY)
    try:
        if reason := foreign(os.fstat(folder)):
            raise NotADump(f"{path.parent} {reason}")
        # Without O_NONBLOCK, opening a pipe that has no writer would block.
        descriptor = os.open(path.name, flags | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if reason := foreign(status):
            raise NotADump(f"{path} {reason}")
        if not stat.S_ISREG(status.st_mode):
            raise NotADump(f"{path} is not a regular file")
        return file.read(LARGEST + 1)


def _parsed(content: bytes, path: Path) -> Dump:
    if len(content) > LARGEST:
        raise NotADump(f"{path}: it has more than {LARGEST >> 20} MiB, which no dump has")
    try:
        return parse(json.loads(content.decode()), str(path))
    except (ValueError, RecursionError) as error:
        raise NotADump(f"{path}: it is not JSON, or only the beginning of it: {error}") from error


def parse(data: Any, name: str) -> Dump:
    """Converts the result of ``json.loads`` for a dump called ``name``.

    Raises:
        NotADump: it is not a dump, or has another version.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise NotADump(f"{name}: it is JSON, but no dump of torch_symm")
    if data.get("version") != VERSION:
        raise NotADump(f"{name}: it is of version {data.get('version')!r}; this torch_symm reads version {VERSION}")
    try:
        return _dump(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise NotADump(f"{name}: a field is missing or wrong: {type(error).__name__}: {error}") from error


def _dump(data: dict[str, Any]) -> Dump:
    complete = _int(data["calls_made"]) <= _int(data["calls_kept"])
    written = _int(data["written_ns"])
    views = {}
    for group in data["groups"]:
        failure = group["failure"]
        members = [Member(_int(m["rank"]), _int(m["global_rank"]), _int(m["pid"])) for m in group["members"]]
        others = _plain(group.get("other_nodes") or "") or None
        view = View(
            # The nodes of a group share its number, but not the boot.
            key=("" if others else str(data["boot_id"]), _int(group["memory"])),
            name=_plain(group["name"]),
            rank=_int(group["rank"]),
            members=members,
            global_ranks=[_int(rank) for rank in group["global_ranks"]],
            other_nodes=others,
            joined_ns=_int(group["joined_ns"]),
            left_ns=_number(group["left_ns"]),
            begun=_int(group["begun"]),
            launched=_number(group["launched"]),
            failure=failure and Failure(_plain(failure["kind"]), _plain(failure["message"]), _int(failure["seen_ns"])),
            peers=[_peer(peer) for peer in group["peers"]],
            written_ns=written,
            complete=complete,
        )
        known = [member.rank for member in members]
        if view.rank not in known or known != sorted({rank for rank in known if 0 <= rank < view.world}):
            raise ValueError(f"group {view.name} has no rank {view.rank}")
        views[_int(group["id"])] = view
    for call in data["calls"]:
        views[_int(call["group"])].calls.append(_call(call))
    return Dump(_plain(data["host"]), _int(data["pid"]), written, list(views.values()))


def _peer(data: dict[str, Any]) -> Peer:
    process, absence = data["process"], data["absence"]
    return Peer(
        rank=_int(data["rank"]),
        process=None if process is None else _plain(process),
        begun=_int(data["begun"]),
        launched=_number(data["launched"]),
        absence=None if absence is None else _plain(absence),
    )


def _call(data: dict[str, Any]) -> Call:
    elements, bytes_in, bytes_out = _int(data["elements"]), _int(data["bytes_in"]), _int(data["bytes_out"])
    return Call(
        number=_int(data["number"]),
        op=_plain(data["op"]),
        text=_plain(data["call"]),
        sequence=_number(data["sequence"]),
        dtype=_plain(data["dtype"]),
        elements=elements,
        itemsize=max(1, _int(data["itemsize"])),
        peer=_number(data["peer"]),
        internode=bool(data.get("internode")),
        even=bool(data["even"]),
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        cuda=str(data["device"]).startswith("cuda"),
        timeout_ms=_int(data["timeout_ms"]),
        created_ns=_int(data["created_ns"]),
        started_ns=_number(data["started_ns"]),
        ended_ns=_number(data["ended_ns"]),
        state=_plain(data["state"]),
        outcome=None if data["outcome"] is None else _plain(data["outcome"]),
        phase=_plain(phase) if (phase := data.get("phase")) else None,
        phase_ns=_number(data.get("phase_ns")),
        algorithm=_plain(algorithm) if (algorithm := data.get("algorithm")) else None,
        waited_ns=_number(data.get("waited_ns")),
        waited_for=_number(data.get("waited_for")),
    )


def _number(value: Any) -> int | None:
    return None if value is None else _int(value)


def _int(value: Any) -> int:
    """Returns ``value`` as a number of 64 bits, so that everything computed from it is finite."""
    if abs(found := int(value)) >> 64:
        raise ValueError(f"{str(value)[:30]} does not fit into 64 bits")
    return found


def _plain(value: Any) -> str:
    """Returns the text without characters that affect a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(value))
