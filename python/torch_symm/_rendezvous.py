"""How ranks find each other by URL: ``symm://`` through a TCP store, ``symm+file://`` through a file.

Both take ``rank`` and ``world_size`` from the query, where ``init_process_group`` puts its arguments, or from the
environment's ``RANK`` and ``WORLD_SIZE``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from torch_symm._repr import name_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from torch_symm._C import TCPStore

Triplet = tuple["Store", int, int]

#: c10d's default, for rendezvous without their own timeout.
DEFAULT_TIMEOUT = timedelta(minutes=30)

#: How long a rank waits for a new server of rank 0 after the server that it reached has ended.
NEW_SERVER = timedelta(seconds=2)

#: The end of sentences about missing variables.
TORCHRUN = "start the ranks with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


def by_tcp(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[Triplet]:
    """``symm://host:port``, ``symm://``, ``symm:///path``; ``?secret_env=NAME``, ``?secret=none``. Rank 0 serves.

    ``host:port``: where rank 0 listens; an IPv6 address is enclosed in brackets. A path: a Unix
    socket. Without these: ``MASTER_ADDR`` and ``MASTER_PORT``; under torchrun, whose agent listens there, a free port
    that rank 0 publishes in the agent's store. ``secret_env`` names an environment variable with a secret that all
    ranks have. Without a secret, rank 0 serves on loopback only processes of this user and root, over a Unix socket in
    place of the port. With ``secret=none`` it serves every process there over TCP.

    Raises:
        ValueError: a part of the URL or of the environment is missing or unknown; the message names it.
        DistStoreError: not all ranks arrived within ``timeout``; the message on every rank names the missing ranks.
        DistNetworkError: rank 0 cannot be reached; the message says so.
        SymmConfigError: another live process has arrived as this rank; the message names both.
    """
    from torch.distributed import DistNetworkError, DistStoreError

    parts = urlsplit(url)
    query, rank, world_size = _query(parts, "symm", {"secret_env", "secret"})
    secret = _secret(query)
    require_same_user = secret is None and "secret" not in query
    if parts.netloc:
        host, port = _endpoint(parts)
    elif parts.path:
        host, port = f"unix:{unquote(parts.path)}", 0
    else:
        host, port = _variable("MASTER_ADDR"), _whole("MASTER_PORT", _variable("MASTER_PORT"))
    deadline = time.monotonic() + timeout.total_seconds()
    remove_address: Callable[[], object] | None = None
    beside_agent = not parts.netloc and not parts.path and _agent_listens()
    if beside_agent:
        opened, remove_address = _beside_agent(host, port, rank, world_size, deadline, secret, require_same_user)
        opened.set_timeout(timeout)
    else:
        opened = _open(host, port, rank, world_size, timeout, secret, require_same_user)
    restarts = _restarts()
    prefix = f"restart {restarts}/symm" if restarts else "symm"
    try:
        opened._assemble(prefix, rank, world_size, left(deadline))
    except DistNetworkError as ended:
        if rank == 0 or beside_agent:
            raise
        # The server may have been that of an earlier group, which rank 0 had not left yet: it opens another one.
        try:
            opened = _open(host, port, rank, world_size, min(left(deadline), NEW_SERVER), secret, require_same_user)
        except (DistNetworkError, DistStoreError):
            raise ended from None
        if opened.check([f"{prefix}/turn/{rank}"]):  # the same server: only the connection ended
            raise
        opened.set_timeout(timeout)
        opened._assemble(prefix, rank, world_size, left(deadline))
    if remove_address:
        remove_address()
    yield _of_this_start(opened), rank, world_size
    _only_once("symm")


def by_file(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[Triplet]:
    """``symm+file:///path``: a file that all ranks can lock and write.

    Raises:
        DistStoreError: the file cannot be opened, or a process held its lock until ``timeout``; the message names it.
        ValueError: a part of the URL or of the environment is missing or unknown; the message names it.
    """
    parts = urlsplit(url)
    _, rank, world_size = _query(parts, "symm+file", set())
    if parts.netloc:
        raise _error("symm+file", f"{parts.netloc!r} stands where no host belongs; write symm+file:///path")
    if not parts.path:
        raise _error("symm+file", "path missing")
    from torch_symm._native import load

    yield _of_this_start(load().FileStore(unquote(parts.path), world_size, timeout)), rank, world_size
    _only_once("symm+file")


def _error(scheme: str, sentence: str) -> ValueError:
    return ValueError(f"Error initializing torch.distributed using {scheme}:// rendezvous: {sentence}")


def _only_once(scheme: str) -> NoReturn:
    raise RuntimeError(f"Unable to perform re-rendezvous using {scheme}:// method")


def _query(parts: SplitResult, scheme: str, known: set[str]) -> tuple[dict[str, str], int, int]:
    """The parameters of the URL, the rank and the number of ranks."""
    try:
        lists = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise _error(scheme, f"the query {parts.query!r} is no list of name=value") from error
    unknown = sorted(lists.keys() - known - {"rank", "world_size"})
    if unknown:
        names = ", ".join(sorted(known | {"rank", "world_size"}))
        raise _error(scheme, f"unknown parameters: {', '.join(unknown)}; the known ones are {names}")
    twice = sorted(name for name, values in lists.items() if len(values) > 1)
    if twice:
        raise _error(scheme, f"parameters given twice: {', '.join(twice)}")
    query = {name: values[0] for name, values in lists.items()}
    found = []
    for name, variable, words in (("rank", "RANK", "rank"), ("world_size", "WORLD_SIZE", "world size")):
        # torch writes -1 for "not given".
        given = query.get(name, "-1")
        text = os.environ.get(variable) if given == "-1" else given
        if not text:
            raise _error(
                scheme,
                f"{words} parameter missing, and {variable} is not set: "
                f"pass {name}= to init_process_group, or {TORCHRUN}",
            )
        found.append(_whole(words, text, scheme))
    rank, world_size = found
    if not 0 <= rank < world_size:
        raise _error(scheme, f"rank {rank} does not exist in a world of {world_size}")
    return query, rank, world_size


def _whole(what: str, text: str, scheme: str = "symm") -> int:
    try:
        return int(text)
    except ValueError:
        raise _error(scheme, f"{what} {text!r} is no number") from None


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise _error(
            "symm",
            f"environment variable {name} expected, but not set: write symm://host:port, or {TORCHRUN}",
        )
    return value


def _secret(query: dict[str, str]) -> str | None:
    if query.get("secret", "none") != "none":
        raise _error("symm", "a secret does not belong into the URL, only secret=none does; use secret_env")
    if "secret_env" not in query:
        return None
    if "secret" in query:
        raise _error("symm", "secret_env and secret=none contradict each other")
    name = query["secret_env"]
    value = os.environ.get(name) if name else None
    if not value:
        raise _error("symm", f"environment variable {name!r}, which secret_env names, is not set or empty")
    return value


def _endpoint(parts: SplitResult) -> tuple[str, int]:
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _error("symm", f"{parts.netloc!r}: {error}") from error
    if parts.username is not None:
        raise _error("symm", "a secret does not belong into the URL; use secret_env")
    if not host:
        raise _error("symm", "host missing")
    if port is None:
        raise _error("symm", "port number missing")
    if parts.path not in ("", "/"):
        raise _error("symm", f"{parts.path!r} after host and port")
    return host, port


def _agent_listens() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta, secret: str | None, require_same_user: bool
) -> TCPStore:
    """A store that rank 0 serves. Multi-tenant, so that a second group or RPC of the same process can share it."""
    from torch.distributed import DistNetworkError

    from torch_symm._native import load

    try:
        # Does not wait for the workers, because that only counts them; `TCPStore._assemble` names the missing ones.
        store: TCPStore = load().TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            secret=secret,
            require_same_user=require_same_user,
        )
    except DistNetworkError as error:
        if rank == 0:
            raise
        raise DistNetworkError(
            f"rank {rank} of {world_size} cannot reach rank 0, which serves the rendezvous: {error}"
        ) from error
    return store


def _beside_agent(
    host: str, port: int, rank: int, world_size: int, deadline: float, secret: str | None, require_same_user: bool
) -> tuple[TCPStore, Callable[[], object] | None]:
    """A store that rank 0 serves at a free port, which the other ranks learn from the store of torchrun's agent.

    ``deadline`` is a time of ``time.monotonic``; the returned store has the remaining time as its timeout. On rank
    0 also returns a function that removes the address from the agent's store, to be called once all ranks have arrived.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch._C._distributed_c10d import TCPStore as AgentStore
    from torch.distributed import DistStoreError

    from torch_symm._native import load

    agent = AgentStore(host, port, world_size, is_master=False, timeout=left(deadline))
    turns = PrefixStore(f"symm/rendezvous/{_restarts()}", agent)
    # Every rank counts its own rendezvous: a second one in the same processes has its own server and key.
    turn = turns.add(f"turn/{rank}", 1)
    if rank != 0:
        if (behind := turns.add("turn/0", 0) - turn) > 0:
            # Rank 0 has given up a rendezvous since this rank did.
            turn = turns.add(f"turn/{rank}", behind)
        key = f"endpoint/{turn}"
        try:
            turns.wait([key], left(deadline))
        except DistStoreError as error:
            missing = _missing(turns, turn, world_size)
            # Rank 0 has yet to start this rendezvous, so the next attempt of this rank belongs to it.
            turns.add(f"turn/{rank}", -1)
            raise DistStoreError(missing) from error
        place, _, number = turns.get(key).decode().rpartition(" ")
        return _open(place, int(number), rank, world_size, left(deadline), secret, require_same_user), None
    if require_same_user and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        # All ranks are on this node, whatever address the agent uses.
        host = "localhost"
    # Do not wait for the workers: they connect only after this rank has published the address below.
    store: TCPStore = load().TCPStore(
        host,
        0,
        world_size,
        is_master=True,
        timeout=left(deadline),
        wait_for_workers=False,
        multi_tenant=False,
        secret=secret,
        require_same_user=require_same_user,
    )
    key = f"endpoint/{turn}"
    turns.set(key, f"{store.host} {store.port}")
    return store, partial(turns.delete_key, key)


def _missing(turns: Store, turn: int, world_size: int) -> str:
    """Returns an error that names the ranks which have not started rendezvous ``turn`` of their processes."""
    late = []
    for rank in range(world_size):
        key = f"turn/{rank}"
        if not turns.check([key]) or turns.add(key, 0) < turn:
            late.append(rank)
    if 0 not in late:
        return f"rendezvous of {world_size} ranks: rank 0 arrived, but did not serve the store before the timeout"
    return (
        f"rendezvous of {world_size} ranks: {name_ranks(late)} did not arrive before the timeout, "
        f"{world_size - len(late)} did"
    )


def left(deadline: float) -> timedelta:
    """Returns the time until ``deadline`` of ``time.monotonic``, at least 1 ms: a store takes 0 for "no limit"."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _restarts() -> int:
    return _whole("TORCHELASTIC_RESTART_COUNT", os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0")


def _of_this_start(store: Store) -> Store:
    """Separates ``store`` from keys that an earlier start of the same ranks may have left in it."""
    from torch._C._distributed_c10d import PrefixStore

    restarts = _restarts()
    return PrefixStore(f"restart {restarts}", store) if restarts else store
