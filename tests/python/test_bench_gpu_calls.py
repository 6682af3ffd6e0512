"""How the GPU benchmark calls torch's symmetric memory and barriers, with mocks for the parts that need a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch_symm.tools.bench.gpu import contenders, torch_calls
from torch_symm.tools.bench.gpu.calls import nccl_barrier
from torch_symm.tools.bench.gpu.contenders import GroupFailed, Side, UnavailableError
from torch_symm.tools.bench.gpu.inputs import Call, Inputs, Place, Setting

CPU = torch.device("cpu")
COUNT = 1200


class Peers:
    """A world of 3 in one process: a mock of torch's operators that knows the other ranks' tensors."""

    def __init__(self, rank: int) -> None:
        self.inputs = Inputs(3, COUNT, torch.float32, CPU, seed=11)
        self.tensors = [torch.empty(COUNT) for _ in range(3)]
        for other, tensor in enumerate(self.tensors):
            self.inputs.fill(tensor, other)
        self.rank, self.share, self.requested = rank, COUNT // 3, list[tuple[object, ...]]()
        self.spoil = False

    def setting(self) -> Setting:
        place = Place(*(torch.zeros(COUNT * 4, dtype=torch.uint8) for _ in range(2)))
        group = SimpleNamespace(group_name="the group")
        return Setting(self.rank, self.inputs, self.tensors[self.rank].clone(), group, place)

    def _answer(self, result: torch.Tensor) -> torch.Tensor:
        result[-1] += float(self.spoil)
        return result

    def all_gather(self, source: torch.Tensor, name: str) -> torch.Tensor:
        self.requested.append((name,))
        assert torch.equal(source, self.tensors[self.rank][: self.share])
        return self._answer(torch.cat([tensor[: self.share] for tensor in self.tensors]))

    def reduce_scatter(self, source: torch.Tensor, op: str, name: str) -> torch.Tensor:
        self.requested.append((op, name))
        assert torch.equal(source, self.tensors[self.rank])
        return self._answer(sum(self.tensors)[self.rank * self.share :][: self.share].clone())


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("op", "build", "requested"),
    [
        ("all_gather", torch_calls.low_contention_all_gather, ("the group",)),
        ("reduce_scatter", torch_calls.low_contention_reduce_scatter, ("sum", "the group")),
    ],
)
def test_low_contention_forms_are_checked(
    monkeypatch: pytest.MonkeyPatch, rank: int, op: str, build: Callable[[Setting], Call], requested: tuple[str, ...]
) -> None:
    peers, waited = Peers(rank), list[torch.Tensor]()

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        waited.append(tensor)
        return tensor

    monkeypatch.setattr(torch.ops.symm_mem, f"_low_contention_{op}", getattr(peers, op), raising=False)
    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", wait)
    call = build(peers.setting())
    call.reset()
    call.run()
    assert call.check(1) is None and len(waited) == 1
    # A replay that does nothing must not find the old result.
    call.reset()
    assert "nan" in (call.check(1) or "")
    call.run()
    assert call.check(2) is None
    peers.spoil = True
    call.run()
    assert "1 elements wrong" in (call.check(3) or "")
    assert peers.requested == [requested] * 3


def test_the_barrier_of_signal_pads_waits_on_the_host_but_not_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("synchronize"))
    handle = SimpleNamespace(barrier=lambda channel: done.append(f"barrier {channel}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    call = torch_calls.signal_pad_barrier(handle)(Peers(0).setting())
    for capturing, expected in ((False, ["barrier 0", "synchronize"]), (True, ["barrier 0"])):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        done.clear()
        call.run()
        assert done == expected


def test_nccls_barrier_does_not_block_the_host_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    work = SimpleNamespace(synchronize=lambda: done.append("synchronize"), wait=lambda: done.append("wait"))

    def barrier(group: object, device_ids: list[int | None], async_op: bool = False) -> object:
        done.append(("barrier", async_op))
        return work if async_op else None

    monkeypatch.setattr(dist, "barrier", barrier)
    call = nccl_barrier(Peers(0).setting())
    for capturing, expected in ((False, [("barrier", False)]), (True, [("barrier", True), "synchronize"])):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        done.clear()
        call.run()
        assert done == expected


def test_a_torch_without_low_contention_forms_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "symm_mem", SimpleNamespace(_low_contention_all_gather=print))
        with pytest.raises(UnavailableError, match="has no _low_contention_reduce_scatter"):
            contenders._low_contention(None)
    importlib.import_module("torch.distributed._symmetric_memory")
    assert set(contenders._low_contention(None)) == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("answer", ["TIMEOUT", "COMM_ERROR"])
def test_a_group_that_failed_silently_is_noticed(answer: str) -> None:
    error = "SUCCESS"
    backend = SimpleNamespace(get_error=lambda: f"ErrorType.{error}")
    side = Side("x", SimpleNamespace(_get_backend=lambda _device: backend), Place(torch.empty(0), torch.empty(0)))
    side.sound(CPU)
    error = answer
    with pytest.raises(GroupFailed, match=answer):
        side.sound(CPU)


def test_native_groups_answer_as_the_benchmark_reads_it() -> None:
    def body(_rank: int, _world: int) -> str:
        group = dist.group.WORLD
        assert group is not None
        Side("symm", group, Place(torch.empty(0), torch.empty(0))).sound(CPU)
        return str(group._get_backend(CPU).get_error())

    # Not in this process: later tests fork their ranks from it, with their own environment.
    assert run_ranks(body, 1)[0].endswith("SUCCESS")
