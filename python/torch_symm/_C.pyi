import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, overload

import torch
from torch._C._distributed_c10d import Backend, Store, _SymmetricMemory
from torch.distributed import DistBackendError

__version__: str

class SymmPeerError(DistBackendError): ...
class SymmTimeoutError(DistBackendError): ...
class SymmMismatchError(DistBackendError): ...
class SymmConfigError(DistBackendError): ...
class SymmAbortedError(DistBackendError): ...

class Options(Backend.Options):
    """Timeout and identity of a group.

    ``group_name`` names it in messages; ``global_ranks_in_group`` lists its ranks in the default group (empty: the same
    as in this group).
    ``timeout``, a ``timedelta`` or a number of seconds, limits joining and every call that does not pass its own limit.
    The default, 30 minutes, leaves the choice to the argument ``timeout`` of ``init_process_group`` and ``new_group``.
    ``inter_node_backend`` connects ranks on several nodes: ``"none"``, ``"gloo"``, ``"nccl"``, ``"auto"``, backends
    that torch knows, such as ``"cpu:mine,cuda:nccl"``, or ``""`` for the choice of ``SYMM_INTER_NODE_BACKEND``; later
    groups then use the choice of the default group.
    ``reduce_dtype`` is the type of sums of CPU tensors between nodes: ``"tensor"`` or ``"float32"``, which rounds
    floats narrower than 32 bits only once but sends twice the bytes. ``""`` means ``"tensor"``; in later groups it
    means the type of the default group. With ``order="tree"``, ``""`` means ``"float32"``.
    ``order`` is the order in which reductions combine the ranks' floats: ``"rank"``, ((x0 + x1) + x2) + x3, or
    ``"tree"``, pairwise: (x0 + x1) + (x2 + x3), or ``""`` for the choice of ``SYMM_ORDER``; later groups then use
    the choice of the default group. All ranks choose the same order.
    ``cta_policy`` selects how many processors of a GPU long collectives may take from computation that runs at the same
    time: ``"default"``, ``"efficiency"`` (few) or ``"zero"`` (copy engines move the bytes), or ``""`` for the choice of
    ``SYMM_CTA_POLICY``. ``max_ctas`` is the maximum number of blocks of a CUDA kernel; 0 means ``SYMM_MAX_CTAS``. In
    later groups, ``""`` and 0 mean the choices of the default group. All ranks choose the same values.

    Raises:
        ValueError: a timeout of 0 or less, or a number of seconds above a year; a word that is not valid, also when it
            is assigned. ``inter_node_backend`` may name a backend that torch knows only later, so it is checked when
            a group is made.
    """

    _timeout: timedelta
    @property
    def timeout(self) -> timedelta: ...
    @timeout.setter
    def timeout(self, timeout: timedelta | float) -> None: ...
    global_ranks_in_group: list[int]
    inter_node_backend: str
    reduce_dtype: str
    order: str
    cta_policy: str
    max_ctas: int
    def __init__(
        self,
        timeout: timedelta | float = ...,
        group_name: str = "",
        global_ranks_in_group: Sequence[int] = ...,
        inter_node_backend: str = "",
        reduce_dtype: str = "",
        order: str = "",
        cta_policy: str = "",
        max_ctas: int = 0,
    ) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, object]) -> Options: ...

class ProcessGroupSymm(Backend):
    """A joined group. Made by ``dist.init_process_group("symm")``, ``dist.new_group``, or directly from a store.

    All ``size`` ranks make it with stores that share keys. No other group may use these keys: pass a ``PrefixStore``.
    The call returns once all ranks have joined. ``timeout``, a ``timedelta`` or a number of seconds (30 minutes),
    limits joining and every call that does not pass its own limit. Messages name the group by ``group_name``, or call
    it ``"default"``. ``rank`` is from 0 to ``size`` - 1, ``store`` any store of torch or this package; ``options``
    replace both ``timeout`` and ``group_name``.

    Raises:
        SymmConfigError: the group cannot be formed; the message says why.
        SymmTimeoutError: not all ranks joined in time; the message names the missing ranks.
        ValueError: a timeout below 0, above a year, or not a number.
    """

    @overload
    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None: ...
    @overload
    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta | float = ..., group_name: str = ""
    ) -> None: ...
    @property
    def options(self) -> Options: ...
    def _device(self) -> int | None: ...
    def _set_default_timeout(self, timeout: timedelta | float) -> None: ...
    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing, on any ``device``: torch calls it on ranks outside a new group."""
    def get_sequence_number(self) -> int: ...
    def _drop_coalesced(self) -> None:
        """Closes the block that ``_start_coalescing`` opened, if there is one, without a work for its calls."""
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...

class _GlooSubstitute(ProcessGroupSymm):
    """Replaces a group of Gloo; for Python, it is also an instance of ``ProcessGroupGloo``.

    ``gloo_store``: where Gloo's ranks meet; Gloo leaves keys in it, so no other group may use it. ``cuda``: whether a
    group of Gloo accompanies it, for CUDA tensors.
    """

    def __init__(self, store: Store, gloo_store: Store, rank: int, size: int, options: Options, cuda: bool) -> None: ...

class _GlooValueError(ValueError, RuntimeError): ...
class _GlooTypeError(TypeError, RuntimeError): ...

class NativeStore(Store):
    """The common base of this package's stores: every method of ``torch.distributed.Store``, and ``rank_barrier``.

    Keys are text, values any bytes. ``timeout`` limits every call (``set_timeout``; initially 300 s; zero means 24 h);
    ``wait`` has its own limit.

    Raises:
        DistStoreError: the call timed out, and the message names the missing keys; or the store is full.
        QueueEmptyError: ``queue_pop(key, block=False)`` of an empty queue.
        DistNetworkError: the store can no longer be reached.
        ValueError: ``add`` to a value that is not a number, unequal numbers of keys and values, a negative timeout.
    """

    @property
    def timeout(self) -> timedelta: ...
    def rank_barrier(self, key: str, rank: int, world_size: int, timeout: timedelta | None = None) -> None:
        """Returns once all ``world_size`` ranks have called it with this ``key``, which may be reused.

        Raises:
            DistStoreError: ``timeout``, or without it the store's timeout, has passed; the message names the missing
                ranks. ``key`` must not be used again then.
            ValueError: ``rank`` is not below ``world_size``.
        """

    def _assemble(self, prefix: str, rank: int, world_size: int, timeout: timedelta) -> None: ...
    def _gather(
        self, prefix: str, what: str, word: str, rank: int, world_size: int, timeout: timedelta
    ) -> list[str]: ...
    def clone(self) -> Store:
        """Returns the same store, of the same class, with its own timeout."""

    def __copy__(self) -> Store: ...
    def __deepcopy__(self, memo: dict[int, object]) -> Store: ...

class MemoryStore(NativeStore):
    """A store for the threads of this process.

    It cannot be pickled (``TypeError``), and a forked child cannot use it (``DistStoreError``).
    """

    def __init__(self) -> None: ...

class FileStore(NativeStore):
    """A store in the file ``path`` for ``world_size`` processes. A pickle opens the same file.

    ``timeout``, a ``timedelta``, limits the wait for the file's lock, and later calls that do not pass their own limit.

    Raises:
        DistStoreError: the file cannot be opened or is not such a store, or another process, which the message names,
            held the file's lock for all of ``timeout``.
        ValueError: ``world_size`` or ``timeout`` is negative.
    """

    def __init__(self, path: str | os.PathLike[str], world_size: int, timeout: timedelta = ...) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def world_size(self) -> int: ...

class TCPStore(NativeStore):
    """A store on a server, which the process with ``is_master`` runs; arguments as in ``torch.distributed.TCPStore``.

    ``host_name``: a name, an address, or ``unix:/path`` with port 0. ``port``: 0 makes a master choose a free port,
    which the property ``port`` has. ``world_size``: number of users, ``None`` if unknown; ``wait_for_workers`` waits
    for all of them. ``multi_tenant``: masters of one process with the same port share a server. ``master_listen_fd``: a
    listening socket to serve. ``timeout``, a ``timedelta``: for connecting, for waiting for users, and for later calls
    (300 s). ``secret``: every user must pass it. ``require_same_user``: on loopback and without a secret, serves only
    processes of this user, on a Unix socket in place of the port; ``host`` then names the socket. A pickle connects as
    a client; with a secret, pickling raises ``TypeError``.

    Raises:
        DistNetworkError: the server cannot be reached within ``timeout``, or the port is taken.
        DistStoreError: not all users joined within ``timeout``, or the server has another secret.
        ValueError: ``port``, ``world_size`` or ``secret`` is out of range.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = ...,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        secret: str | bytes | None = None,
        require_same_user: bool = False,
    ) -> None: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def is_master(self) -> bool: ...
    @property
    def world_size(self) -> int | None: ...

class SymmetricWindow(_SymmetricMemory):
    """The ranks' symmetric tensors as one window: the result of ``rendezvous`` for groups of symm.

    Offsets and sizes are elements of ``dtype``. Ranks are numbered as in the window's group.
    """

    def get_buffer(  # type: ignore[override]  # torch's method also accepts None
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor: ...
    def get_signal_pad(  # type: ignore[override]
        self, rank: int, sizes: Sequence[int] = ..., dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> torch.Tensor: ...
    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

class _CostModel:
    """Prices of collectives on one mesh."""

    @property
    def gb_per_s(self) -> list[float]: ...
    @property
    def us(self) -> list[float]: ...
    @property
    def reference_us(self) -> float:
        """Time of the reference in the state in which the profile was measured; 0 without a profile."""

    @property
    def local(self) -> tuple[float, float, float] | None:
        """Local µs of a step with a collective and of a step without one, both excluding copies, and GB/s of copies."""

    @property
    def origin(self) -> str: ...
    def price(self, op: str, bytes: float, dim: int) -> tuple[float, str, str]:
        """Microseconds, the algorithm, and the source of the price.

        Raises:
            ValueError: ``op`` has no price, ``bytes`` cannot be moved, or the mesh has no such dimension.
        """

def _node_id() -> str: ...
def _set_backend_factory(make: Callable[..., Any], find: Callable[[str], tuple[str, str]]) -> None: ...
def _drop_workspaces(group_name: str) -> None: ...
def _destroy_all(farewell: str = "") -> None: ...
def _open_cost_model(
    device: str,
    ranks: Sequence[int],
    job: int,
    per_node: int,
    source: str,
    gb_per_s: Sequence[float] = ...,
    us: Sequence[float] = ...,
    profile: bytes = b"",
) -> _CostModel | None: ...
def _profile_key(device: str, ranks: int) -> str: ...
def _set_bundled_profile_dir(folder: bytes) -> None: ...
def _user_profile_dir() -> bytes: ...
def _log_info(text: str) -> None: ...
def _set_trial_thresholds(multi_rail_bytes: int, chunk_bytes: int, gather_bytes: int) -> None: ...
def _log_to_queue(filter: str, on: bool) -> None: ...
def _log_lines(limit_ms: int) -> str: ...
def _cuda_libraries(folders: Sequence[bytes]) -> None: ...
def _wrap_store(store: Store) -> NativeStore: ...
def _run_load(clients: Sequence[Store], work: str, calls: int) -> tuple[float, list[int]]: ...
def _nvlink_matrix(uuids: Sequence[str]) -> list[list[int]]: ...
def _topology_report() -> str: ...
def _stats() -> str: ...
def _stats_seconds() -> int: ...
def _trace() -> str: ...
def _write_trace(path: bytes, name: str, content: bytes) -> str: ...
def _supports_symm_mem(device: int) -> bool: ...
def _compare_operators(group_name: str, call: str) -> None: ...
def _reject_operator(group_name: str, reason: str) -> None: ...
