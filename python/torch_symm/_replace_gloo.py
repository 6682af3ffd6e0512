"""Replaces Gloo by symm, for programs that only choose well-known backends.

Every rank publishes in the store whether it can take part, then how its joining ended, so all ranks agree on each
group. A group that symm rejects, such as one on several nodes without an inter-node backend, uses Gloo on all ranks.
"""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

#: What ranks publish about themselves: whether they can have a GPU, or why symm cannot serve them.
_CPU, _CUDA, _UNABLE = "cpu", "cuda", "unable: "
#: How joining ended.
_JOINED, _REFUSED, _FAILED = "joined", "refused: ", "failed: "

#: Added to the number of a rank's exchanges while the keys of the last one are being removed.
_READ = 1 << 32
#: Maximum number of seconds to wait for that removal. A rank that has failed does not remove its keys.
_REMOVAL_S = 10.0

#: Lines that this process has already logged. Each is logged once, because many groups would log the same line.
_said: set[str] = set()


def replace_gloo() -> None:
    """From now on, makes symm serve the CPU tensors of every Gloo group. Call it on all ranks.

    This applies to ``backend="gloo"``, ``"cpu:gloo,cuda:nccl"`` and ``init_process_group()`` without a backend. CUDA
    tensors of such a group stay with Gloo. If symm rejects a group on any rank, Gloo serves it on all ranks; the
    log has the reason at INFO. ``dist.get_backend()`` is ``"gloo"``, and the backend is an instance of
    ``ProcessGroupGloo`` for ``isinstance``. ``SYMM_REPLACE_GLOO=1`` does the same without an import.

    Raises:
        RuntimeError: this torch was built without Gloo.
    """
    from torch_symm import _torch_compat

    _torch_compat.make_gloo_by(create)


def create(options: Any, group_options: Any) -> Backend:
    """Makes the group that torch requests from Gloo, described by ``_DistributedBackendOptions``.

    Raises:
        DistStoreError: not all ranks arrived within the timeout; the message names the missing ranks.
        DistBackendError: the group could not be formed on some ranks; the message has the reason of one.
    """
    from torch._C._distributed_c10d import PrefixStore

    from torch_symm._rendezvous import _restarts

    meeting = PrefixStore(f"symm/replaces/{_restarts()}", options.store)
    rank = int(options.group_rank)
    exchange = _Exchange(meeting, rank, int(options.group_size), _seconds(options.timeout))
    try:
        answers = exchange.of("able", f"{secrets.token_hex(8)} {_able(options)}")
    except BaseException:
        from torch_symm import _group

        _group.forget_failed_start()
        exchange.withdraw()
        raise
    exchange.count()
    words = [word.partition(" ") for word in answers]
    able = [word for _, _, word in words]
    if reason := _first(able, _UNABLE):
        return _gloo(options, reason)
    # The same ranks may meet again in this store, in which Gloo leaves its keys.
    gloo_store = PrefixStore(f"gloo {words[0][0]}", exchange.store)
    return _join(options, group_options, exchange, gloo_store, cuda=_CUDA in able)


def _join(options: Any, group_options: Any, exchange: _Exchange, gloo_store: Store, *, cuda: bool) -> Backend:
    from torch import distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from torch_symm import _group
    from torch_symm._native import load

    native = load()
    # Options of Gloo are ignored, as torch ignores them.
    own = _group.prepared(native, options, group_options if isinstance(group_options, native.Options) else None)
    group, timeout = None, own._timeout
    # The exchange and the joining have one deadline.
    own._timeout = min(timeout, exchange.left())
    try:
        store = PrefixStore("symm", exchange.store)
        group = native._GlooSubstitute(store, gloo_store, exchange.rank, exchange.size, own, cuda)
        group._set_default_timeout(timeout)
        mine = _JOINED
    except native.SymmConfigError as error:
        mine = f"{_REFUSED}{error}"
    except BaseException as error:
        _group.forget_failed_start()
        exchange.tell("joined", f"{_FAILED}{error}")
        raise
    try:
        joined = exchange.of("joined", mine)
    except BaseException:
        _group.forget_failed_start()
        raise
    if not _first(joined, _FAILED):
        exchange.remove_keys()
    if set(joined) == {_JOINED} and group is not None:
        _say("symm serves the CPU tensors of groups of gloo")
        made: Backend = group
        return made
    if group is not None:
        group.shutdown()
    if reason := _first(joined, _FAILED):
        _group.forget_failed_start()
        raise dist.DistBackendError(f"a group of gloo, in whose place symm stands, failed: {reason}")
    return _gloo(options, _first(joined, _REFUSED))


def _gloo(options: Any, reason: str) -> Backend:
    from torch_symm import _torch_compat

    _say(f"Gloo serves group {options.group_id!r} itself: {reason}")
    size, ranks = int(options.group_size), list(options.global_ranks_in_group)
    timeout = timedelta(seconds=_seconds(options.timeout))
    return _torch_compat.gloo(str(options.group_id), options.store, int(options.group_rank), size, timeout, ranks)


class _Exchange:
    """Exchanges words of every rank with all others, through a store in which the same ranks may meet again."""

    def __init__(self, meeting: Store, rank: int, size: int, seconds: float) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self._deadline = time.monotonic() + seconds
        self._meeting, self.rank, self.size = meeting, rank, size
        # The number of this rank's exchanges in this store that all ranks have joined. Another rank may still be
        # removing the last one.
        self._number = f"turn of {rank}"
        until = time.monotonic() + min(seconds / 2, _REMOVAL_S)
        while meeting.add(self._number, 0) >= _READ and time.monotonic() < until:
            time.sleep(0.002)
        self._turn = meeting.add(self._number, 0) % _READ + 1
        self.store = PrefixStore(f"turn {self._turn}", meeting)

    def count(self) -> None:
        """Counts this exchange, once every rank has answered.

        A rank that gave up before, or was killed, has not counted. Its next attempt then meets the first attempt of a
        rank that starts later.
        """
        self._meeting.add(self._number, 1)

    def withdraw(self) -> None:
        """Removes this rank's answer to "able", so that no later rank takes this rank for one that still waits."""
        with suppress(Exception):
            self.store.delete_key(f"told/able/{self.rank}")

    def tell(self, question: str, word: str) -> None:
        self.store.set(f"told/{question}/{self.rank}", word)

    def of(self, question: str, mine: str) -> list[str]:
        """Returns each rank's answer, in rank order; without the native part, only this rank's answer."""
        from torch import distributed as dist

        from torch_symm._native import load

        try:
            store = load()._wrap_store(self.store)
        except (ImportError, OSError):
            self.tell(question, mine)
            return [""] * self.rank + [mine]
        try:
            words: list[str] = store._gather("told", question, mine, self.rank, self.size, self.left())
            return words
        except dist.DistStoreError as error:
            raise dist.DistStoreError(
                f"a group of gloo, in whose place symm stands, {error} or lack SYMM_REPLACE_GLOO=1, "
                "which all ranks need"
            ) from error

    def remove_keys(self) -> None:
        """Removes the keys of this and of earlier exchanges, once all ranks have all answers and have called this.

        Does not wait. The keys remain if a rank ends before it calls this, or if the store cannot delete keys.
        """
        # A group must not fail because of keys that remain.
        with suppress(Exception):
            # Every rank answers "joined" after it has read all answers to "able".
            self.store.delete_key(f"told/able/{self.rank}")
            self._meeting.add(self._number, _READ)
            if self.store.add("read", 1) == self.size:
                self._remove_all()

    def _remove_all(self) -> None:
        everyone = range(self.size)
        words = [f"told/{question}/{rank}" for question in ("able", "joined") for rank in everyone]
        for turn in range(1, self._turn + 1):
            for key in ("read", *(words if turn < self._turn else words[self.size :])):
                self._meeting.delete_key(f"turn {turn}/{key}")
        # Last, because the ranks then use the first turn again.
        for rank in everyone:
            self._meeting.delete_key(f"turn of {rank}")

    def left(self) -> timedelta:
        from torch_symm._rendezvous import left

        return left(self._deadline)


def _able(options: Any) -> str:
    from torch import distributed as dist

    from torch_symm._native import load

    if getattr(options, "enable_reconfigure", False):
        return f"{_UNABLE}enable_reconfigure is Gloo's alone"
    try:
        load()
    except (ImportError, OSError) as error:
        return f"{_UNABLE}{error}"
    return _CUDA if "cuda" in dist.Backend.backend_capability["symm"] else _CPU


def _first(words: list[str], kind: str) -> str:
    """Returns the first word with the prefix ``kind``, with its rank instead of the prefix; empty if no word has it."""
    return next((f"rank {rank}: {word[len(kind) :]}" for rank, word in enumerate(words) if word.startswith(kind)), "")


def _seconds(timeout: Any) -> float:
    return float(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)


def _say(sentence: str) -> None:
    if sentence in _said:
        return
    _said.add(sentence)
    from torch_symm._native import load

    try:
        load()._log_info(sentence)
    except (ImportError, OSError):
        logging.getLogger("torch_symm").info(sentence)
