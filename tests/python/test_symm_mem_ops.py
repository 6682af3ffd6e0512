"""torch.ops.symm_mem on CPU tensors, compared with the collectives of the group.

P9: a rejection on one rank reaches ranks that wait for its operator.
"""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
from expected import assert_same_bits, seeded
from ranks import init, meet, run_ranks
from test_symm_mem_backend import cpu
from test_tensor_layouts import mapped
from torch_symm._native import load
from torch_symm.testing import init_process_group

ops: Any = torch.ops.symm_mem
WORLD = "0"
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.complex64,
    torch.float8_e4m3fn,
)  # fmt: skip


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that are the same in every run and different on each rank."""
    return seeded(dtype, shape, 1000 + rank)


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The result of the group's own all-reduce."""
    result = tensor.clone()
    dist.all_reduce(result)
    return result


@pytest.mark.ranks([1, 2, 3, 4], timeout=120)
def test_all_reduces_have_the_bits_of_the_collective(rank: int) -> None:
    for dtype in DTYPES:
        for count in (1, 7, 1000, 70_001):
            # A tensor that is neither at the start of its memory nor aligned.
            tensor = cpu(count + 3, dtype=dtype)[3:]
            given = values(rank, (count,), dtype)
            tensor.copy_(given)
            total, outs = summed(tensor), [torch.empty_like(given) for _ in range(4)]
            found = [ops.one_shot_all_reduce(tensor, "sum", WORLD)]
            assert ops.one_shot_all_reduce_out(tensor, "sum", WORLD, outs[0]) is outs[0]
            assert_same_bits(tensor, given, "the input")
            ops.two_shot_all_reduce_out(tensor, "sum", WORLD, outs[1])
            tensor.zero_()
            found.append(ops.one_shot_all_reduce_copy(tensor, given, "sum", WORLD))
            tensor.zero_()
            ops.one_shot_all_reduce_copy_out(tensor, given, "sum", WORLD, outs[2])
            # A local input of one element: the others are those of the tensor.
            tensor.copy_(given)
            tensor[0].zero_()
            ops.one_shot_all_reduce_copy_out(tensor, given[:1], "sum", WORLD, outs[3])
            tensor.copy_(given)
            assert ops.two_shot_all_reduce_(tensor, "sum", WORLD) is tensor
            for number, each in enumerate((*found, *outs, tensor)):
                assert_same_bits(each, total, f"{dtype} {count}, result {number}")


@pytest.mark.ranks(4)
def test_inputs_may_be_overwritten_at_once(rank: int, world_size: int) -> None:
    """No rank returns while another still reads its input."""
    tensor = cpu(3000)
    for turn in range(100):
        tensor.fill_(turn + rank)
        expected = world_size * turn + sum(range(world_size))
        result = ops.one_shot_all_reduce(tensor, "sum", WORLD)
        tensor.fill_(-1e6)
        assert bool((result == expected).all())
        tensor.fill_(turn + rank)
        ops.two_shot_all_reduce_(tensor, "sum", WORLD)
        assert bool((tensor == expected).all())


@pytest.mark.ranks([1, 2, 3, 4])
def test_reduce_scatter(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = cpu(12 * world_size, dtype=dtype)
        tensor.copy_(values(rank, (12 * world_size,), dtype))
        out = torch.empty(12, dtype=dtype)
        expected = summed(tensor)
        assert ops.reduce_scatter_out(tensor, WORLD, False, out) is out
        assert torch.equal(out, expected.chunk(world_size)[rank])

        rows = cpu(5, 3, 4 * world_size, dtype=dtype)
        rows.copy_(values(rank, (5, 3, 4 * world_size), dtype))
        part = torch.empty(5, 3, 4, dtype=dtype)
        expected = summed(rows)
        ops.reduce_scatter_out(rows, WORLD, True, part)
        assert torch.equal(part, expected.chunk(world_size, dim=-1)[rank])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("backend", ["symm", "gloo"])
@pytest.mark.ranks(2, backend=None)
def test_low_contention_collectives(rank: int, world_size: int, backend: str, symmetric: bool) -> None:
    """The operators also take plain tensors and tensors that are not contiguous."""
    load()
    init_process_group(backend)
    wait: Callable[[torch.Tensor], torch.Tensor] = torch.ops._c10d_functional.wait_tensor
    tensor = cpu(4 * world_size, 6) if symmetric else torch.empty(4 * world_size, 6)
    for value in (tensor, tensor[:, ::2], tensor[world_size:]):
        value.copy_(values(rank, tuple(value.shape)))
        gathered = wait(ops._low_contention_all_gather(value, WORLD))
        peers = [values(peer, tuple(value.shape), torch.float32) for peer in range(world_size)]
        assert torch.equal(gathered, torch.cat(peers))
        for reduce_op in ("sum", "avg"):
            result = wait(ops._low_contention_reduce_scatter(value, reduce_op, WORLD))
            expected = sum(peers) / (world_size if reduce_op == "avg" else 1)
            torch.testing.assert_close(result, expected.chunk(world_size)[rank])
    with pytest.raises(ValueError, match='reduce_op="max" is not one of "sum", "avg"'):
        ops._low_contention_reduce_scatter(tensor, "max", WORLD)
    with pytest.raises(RuntimeError, match="cannot be divided among 2 ranks"):
        ops._low_contention_reduce_scatter(tensor[:3], "sum", WORLD)


@pytest.mark.ranks([1, 2, 4])
def test_all_to_all_with_splits_in_memory(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for turn in range(10):
        # splits[i][j]: rows from rank i to rank j.
        splits = torch.randint(0, 6, (world_size, world_size), generator=generator)
        if turn == 0:
            splits.zero_()
        tensor, out = cpu(5 * world_size, 3), cpu(5 * world_size * world_size, 3)
        in_splits = cpu(world_size, dtype=torch.int64)
        layout = cpu(2, world_size, dtype=torch.int64)
        tensor.copy_(values(rank, tuple(tensor.shape)))
        in_splits.copy_(splits[rank])
        out.fill_(-1)
        ops.all_to_all_vdev(tensor, out, in_splits, layout, WORLD)
        received = splits[:, rank]
        assert torch.equal(layout[0], received)
        assert torch.equal(layout[1], torch.cumsum(received, 0) - received)
        expected = torch.empty(int(received.sum()), 3)
        used = tensor[: int(splits[rank].sum())].contiguous()
        dist.all_to_all_single(expected, used, received.tolist(), splits[rank].tolist())
        assert torch.equal(out[: expected.shape[0]], expected)
        assert bool((out[expected.shape[0] :] == -1).all())


@pytest.mark.ranks(2)
def test_splits_that_lie_are_refused(rank: int) -> None:
    """A peer's splits define where this rank reads, so all ranks reject wrong ones before anything is written."""
    tensor, out = cpu(8, 2).fill_(1), cpu(16, 2)
    splits, layout = cpu(2, dtype=torch.int64), cpu(2, 2, dtype=torch.int64)
    most = (1 << 63) - 1
    for bad, to, begin in (
        ([9, 0], 0, 0),
        ([-1, 1], 0, 0),
        ([4, 1 << 62], 1, 4),
        ([4, 5], 1, 4),
        ([most, 1], 0, 0),
        ([1, most], 1, 1),
        ([-most - 1, most], 0, 0),
    ):
        splits.copy_(torch.tensor(bad if rank == 0 else [4, 4]))
        with pytest.raises(ValueError, match=rf"rank 0 sends rank {to} {bad[to]} rows from row {begin} on, of 8"):
            ops.all_to_all_vdev(tensor, out, splits, layout, WORLD)
        assert not out.any() and not layout.any()
    splits.copy_(torch.tensor([4, 4]))
    with pytest.raises(ValueError, match=r"receives 4 rows from the ranks before rank 1 and 4 from it, out has 7"):
        ops.all_to_all_vdev(tensor, out[:7], splits, layout, WORLD)
    ops.all_to_all_vdev(tensor, out[:8], splits, layout, WORLD)
    assert bool((out[:8] == 1).all()) and layout.tolist() == [[4, 4], [0, 4]]


@pytest.mark.ranks(2)
def test_remote_tensors_of_a_view(rank: int, world_size: int) -> None:
    tensor = cpu(6, 4)
    tensor.copy_(values(rank, (6, 4)))
    dist.barrier()
    remote = ops.get_remote_tensors(tensor[2:4], WORLD)
    strided = ops.get_remote_tensors(tensor[2:5, 1:].t(), WORLD)
    assert [tuple(one.shape) for one in remote] == [(2, 4)] * world_size
    dist.barrier()
    for peer, one in enumerate(remote):
        assert torch.equal(one, values(peer, (6, 4), torch.float32)[2:4])
        assert torch.equal(strided[peer], values(peer, (6, 4), torch.float32)[2:5, 1:].t())
    assert remote[rank].data_ptr() == tensor[2:4].data_ptr()
    dist.barrier()


@pytest.mark.ranks(1)
def test_words() -> None:
    words = cpu(16, dtype=torch.uint32)
    ops.memset32_(words, 2, 2**32 - 1, 5)
    assert words.view(torch.int32).tolist() == [0] * 2 + [-1] * 5 + [0] * 9
    assert ops.stream_write_value32_(words, 15, 3) is words
    assert words[15].item() == 3
    ops.memset32_(torch.zeros(4, dtype=torch.uint32), 0, 1, 4)
    for bad, message in (
        (lambda: ops.memset32_(cpu(4), 0, 1, 1), "must be a flat, contiguous uint32 tensor"),
        (lambda: ops.memset32_(words.view(4, 4), 0, 1, 1), "must be a flat, contiguous uint32 tensor"),
        (lambda: ops.memset32_(words, -1, 1, 1), r"greater than or equal to 0 \(got -1\)"),
        (lambda: ops.memset32_(words, 0, 1, 0), r"count must be a positive integer \(got 0\)"),
        (lambda: ops.memset32_(words, 0, 2**32, 1), r"val must be in the range of \[0, 4294967295\]"),
        (lambda: ops.memset32_(words, 10, 1, 7), r"exceeded the numel of the input \(16\)"),
        (lambda: ops.memset32_(words, 2**62, 1, 2**62), r"exceeded the numel of the input \(16\)"),
        (lambda: ops.stream_write_value32_(words, 16, 1), r"offset \(16\) exceeded the numel of the input \(16\)"),
        (lambda: ops.stream_write_value32_(words, 0, -1), r"val must be in the range of"),
    ):
        with pytest.raises(RuntimeError, match=message):
            bad()


@pytest.mark.ranks(2)
def test_arguments_are_checked_as_torch_does(rank: int, world_size: int) -> None:
    """Each rank rejects independently, before it waits for another."""
    tensor = cpu(4, 8)
    out = torch.empty(4, 8)
    plain = torch.ones(4, 8)
    splits, layout = cpu(world_size, dtype=torch.int64), cpu(2, world_size, dtype=torch.int64)
    for bad, message in (
        (lambda: ops.one_shot_all_reduce(tensor, "avg", WORLD), 'one_shot_all_reduce: reduce_op="avg" is not "sum"'),
        (lambda: ops.one_shot_all_reduce(tensor.t(), "sum", WORLD), "all_reduce: input must be contiguous"),
        (lambda: ops.one_shot_all_reduce_out(tensor, "sum", WORLD, out[1:]), "input/output size mismatch"),
        (lambda: ops.one_shot_all_reduce_out(tensor, "sum", WORLD, tensor), "refer to a single memory location"),
        (lambda: ops.two_shot_all_reduce_(plain, "sum", WORLD), "two_shot_all_reduce: input must be allocated"),
        (lambda: ops.two_shot_all_reduce_(tensor, "max", WORLD), 'two_shot_all_reduce: reduce_op="max" is not "sum"'),
        (lambda: ops.reduce_scatter_out(tensor, WORLD, False, out), "reduce_scatter expected 1D input"),
        (lambda: ops.reduce_scatter_out(tensor, WORLD, True, out), "last dim size to be input last dim size"),
        (lambda: ops.reduce_scatter_out(tensor, WORLD, True, out[1:]), "same sizes except in the last dimension"),
        (lambda: ops.all_to_all_vdev(tensor, tensor, splits, layout, WORLD), "refer to a single memory location"),
        (lambda: ops.all_to_all_vdev(tensor, out, layout[0], layout, WORLD), "refer to a single memory location"),
        (lambda: ops.multimem_all_reduce_(tensor, "sum", WORLD), "multicast support is required"),
        (lambda: ops.multimem_one_shot_all_reduce(tensor, "sum", WORLD), "multicast support is required"),
        (lambda: ops.multimem_one_shot_all_reduce_out(tensor, "sum", WORLD, out), "multicast support is required"),
        (lambda: ops.multimem_one_shot_reduce_out(tensor, "sum", 0, WORLD, out), "multicast support is required"),
        (lambda: ops.multimem_all_gather_out(tensor, WORLD, out), "multicast support is required"),
    ):
        with pytest.raises(RuntimeError, match=message):
            bad()
    assert ops.one_shot_all_reduce(cpu(0), "sum", WORLD).numel() == 0
    assert bool((ops.one_shot_all_reduce(tensor.fill_(1), "sum", WORLD) == world_size).all())


def low_gathered(tensor: torch.Tensor) -> object:
    return ops._low_contention_all_gather(tensor, WORLD)


def low_scattered(tensor: torch.Tensor, op: str = "sum") -> object:
    return ops._low_contention_reduce_scatter(tensor, op, WORLD)


def one_shot(tensor: torch.Tensor) -> object:
    return ops.one_shot_all_reduce(tensor, "sum", WORLD)


def two_shot(tensor: torch.Tensor) -> object:
    return ops.two_shot_all_reduce_(tensor, "sum", WORLD)


def scattered(tensor: torch.Tensor) -> object:
    n = dist.get_world_size()
    shape = (tensor.shape[0] // n,) if tensor.dim() == 1 else (*tensor.shape[:-1], tensor.shape[-1] // n)
    return ops.reduce_scatter_out(tensor, WORLD, tensor.dim() > 1, torch.empty(shape, dtype=tensor.dtype))


def rows_exchanged(tensor: torch.Tensor, splits: torch.Tensor) -> object:
    layout = torch.empty(2, dist.get_world_size(), dtype=torch.int64)
    return ops.all_to_all_vdev(tensor, torch.empty_like(tensor), splits, layout, WORLD)


#: The calls of rank 0 and of the other ranks on 48 elements of symmetric memory, and parts of both descriptions.
DIFFERENT: dict[str, tuple[Callable[..., object], Callable[..., object], tuple[str, str]]] = {
    "length": (lambda t, s: one_shot(t[:10]), lambda t, s: one_shot(t[:12]), ("10 ×", "12 ×")),
    "length, two shots": (lambda t, s: two_shot(t[:10]), lambda t, s: two_shot(t[:12]), ("10 ×", "12 ×")),
    "dtype": (lambda t, s: one_shot(t.view(torch.int32)), lambda t, s: one_shot(t), ("int32", "float32")),
    "place": (lambda t, s: one_shot(t[:6]), lambda t, s: one_shot(t[6:12]), ("at byte 0", "at byte 24")),
    "nothing": (lambda t, s: one_shot(t[:0]), lambda t, s: one_shot(t), ("(0 ×", "(48 ×")),
    "nothing, two shots": (lambda t, s: two_shot(t), lambda t, s: two_shot(t[:0]), ("(48 ×", "(0 ×")),
    "nothing scattered": (lambda t, s: scattered(t[:0]), lambda t, s: scattered(t), ("(0 ×", "(48 ×")),
    "nothing gathered": (lambda t, s: low_gathered(t[:0]), lambda t, s: low_gathered(t), ("(0 ×", "(48 ×")),
    "operator": (lambda t, s: one_shot(t), lambda t, s: two_shot(t), ("one_shot", "two_shot")),
    "reduction": (lambda t, s: low_scattered(t), lambda t, s: low_scattered(t, "avg"), ("SUM", "AVG")),
    "rows": (lambda t, s: scattered(t), lambda t, s: scattered(t.view(-1, 12)), ("rows of 192", "rows of 48")),
    "dtype of a gather": (
        lambda t, s: low_gathered(t.view(torch.int32)), lambda t, s: low_gathered(t), ("int32", "float32")
    ),
    "row of an exchange": (
        lambda t, s: rows_exchanged(t, s), lambda t, s: rows_exchanged(t.view(-1, 4), s), ("rows of 4", "rows of 16")
    ),
    "rows of an exchange": (
        lambda t, s: rows_exchanged(t, s), lambda t, s: rows_exchanged(t[:24], s), ("(48 rows", "(24 rows")
    ),
    "window of the splits": (
        lambda t, s: rows_exchanged(t, s),
        lambda t, s: rows_exchanged(t, t.view(torch.int64)[: len(s)]),
        ("at byte 0 of window", "at byte 0 of window"),
    ),
}  # fmt: skip


@pytest.mark.ranks([2, 3])
def test_p7_operators_that_differ_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    """Nothing has been written, and the group and the window work afterwards."""
    tensor, splits = cpu(48), cpu(world_size, dtype=torch.int64).zero_()
    tensor.fill_(rank + 1)
    for name, (first, others, (one, other)) in DIFFERENT.items():
        with pytest.raises(torch_symm.SymmMismatchError) as error:
            (first if rank == 0 else others)(tensor, splits)
        found = re.search(r"do not agree: rank 0 \(pid \d+\) called (.*), rank 1 \(.*\) called (.*)", str(error.value))
        assert found and one in found[1] and other in found[2], (name, str(error.value))
        assert bool((tensor == rank + 1).all()), name
        total = world_size * (world_size + 1) / 2
        assert bool((ops.one_shot_all_reduce(tensor, "sum", WORLD) == total).all()), name


@pytest.mark.ranks(2)
def test_nothing_is_reduced_and_gathered(world_size: int) -> None:
    for empty in (cpu(48)[:0], torch.empty(0)):
        assert one_shot(empty).numel() == two_shot(empty).numel() == 0  # type: ignore[attr-defined]
        assert low_gathered(empty).shape == low_scattered(empty).shape == (0,)  # type: ignore[attr-defined]
    assert scattered(cpu(48)[:0]).numel() == 0  # type: ignore[attr-defined]


#: Number of rows on every rank: divisible by 2 and by 3.
ELEMENTS = 12


def symmetric(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return cpu(*size, dtype=dtype).fill_(1)


def exchanged(tensor: torch.Tensor, splits: torch.dtype) -> None:
    world = dist.get_world_size()
    counts = symmetric(world, dtype=torch.int64)
    symm_mem.rendezvous(counts, WORLD)
    out, layout = torch.empty(ELEMENTS), torch.empty(2, world, dtype=splits)
    ops.all_to_all_vdev(tensor, out, counts, layout, WORLD)


def reduced(tensor: torch.Tensor, out: torch.Tensor) -> None:
    ops.reduce_scatter_out(tensor, WORLD, False, out)


Call = Callable[[torch.Tensor, int], object]

#: The call of one rank, which rejects it; the call of the other ranks, with tensors of the same kind; and the error.
CASES: dict[str, tuple[Call, Call, str]] = {
    "dtype of the output": (
        lambda t, n: ops.one_shot_all_reduce_out(t, "sum", WORLD, t.double()),
        lambda t, n: ops.one_shot_all_reduce_out(t, "sum", WORLD, t.clone()),
        "the output Double",
    ),
    "shape of the output": (
        lambda t, n: ops.two_shot_all_reduce_out(t, "sum", WORLD, torch.empty(5)),
        lambda t, n: ops.two_shot_all_reduce_out(t, "sum", WORLD, t.clone()),
        "input/output size mismatch",
    ),
    "mapped read-only": (
        lambda t, n: reduced(t, mapped("fixed", mmap.PROT_READ)[: ELEMENTS // n]),
        lambda t, n: reduced(t, torch.empty(ELEMENTS // n)),
        "memory that may not be written",
    ),
    "reduce op": (
        lambda t, n: ops.two_shot_all_reduce_(t, "max", WORLD),
        lambda t, n: ops.two_shot_all_reduce_(t, "sum", WORLD),
        'reduce_op="max" is not "sum"',
    ),
    "not symmetric": (
        lambda t, n: ops.one_shot_all_reduce(torch.ones(ELEMENTS), "sum", WORLD),
        lambda t, n: ops.one_shot_all_reduce(t, "sum", WORLD),
        "input must be allocated with empty_strided_p2p",
    ),
    "not divisible": (
        lambda t, n: reduced(t[: n + 1], torch.empty(1)),
        lambda t, n: reduced(t, torch.empty(ELEMENTS // n)),
        "to be divisible by world_size",
    ),
    "layout": (
        lambda t, n: exchanged(t, torch.int32),
        lambda t, n: exchanged(t, torch.int64),
        "out_splits_offsets must be contiguous int64",
    ),
    "symmetric for the others alone": (
        lambda t, n: ops._low_contention_reduce_scatter(torch.ones(n + 1), "sum", WORLD),
        lambda t, n: ops._low_contention_reduce_scatter(t, "sum", WORLD),
        "cannot be divided among",
    ),
    "without symmetric memory": (
        lambda t, n: ops._low_contention_all_gather(torch.tensor(1.0), WORLD),
        lambda t, n: ops._low_contention_all_gather(torch.ones(3), WORLD),
        "a tensor without dimensions cannot be gathered",
    ),
    "before the others have met": (
        lambda t, n: ops.get_remote_tensors(torch.ones(3), WORLD),
        lambda t, n: ops.get_remote_tensors(symmetric(3), WORLD),
        "Tensor is not allocated from Symmetric Memory",
    ),
}

#: Cases in which the other ranks wait in an all-gather; in all others they wait in a barrier of symmetric memory.
IN_ALL_GATHER = ("without symmetric memory", "before the others have met")


def refused_on_rank_1(rank: int, world: int) -> None:
    for name, (wrong, right, refusal) in CASES.items():
        init(rank, world, name=name)
        tensor = symmetric(ELEMENTS)
        symm_mem.rendezvous(tensor, WORLD).barrier()
        start = time.monotonic()
        with pytest.raises((ValueError, RuntimeError)) as error:
            (wrong if rank == 1 else right)(tensor, world)
        took = time.monotonic() - start
        meet(f"reported {name}", rank, world)
        assert isinstance(error.value, torch_symm.SymmMismatchError) == (rank != 1), (name, repr(error.value))
        call = "all_gather, collective #" if name in IN_ALL_GATHER else "a barrier of symmetric memory"
        words = ["rank 1 (pid", "rejected a call and has not repeated it since", f"blocked in {call}", refusal]
        for word in words[3:] if rank == 1 else words:
            assert word in str(error.value), (name, word, str(error.value))
        assert rank == 1 or took < 1, name
        dist.destroy_process_group()


@pytest.mark.timed
@pytest.mark.parametrize("world", [2, 3])
def test_p9_a_refused_operator_is_told_to_the_ranks_that_wait_for_it(world: int) -> None:
    run_ranks(refused_on_rank_1, world, backend=None)


def repeated_rightly(rank: int, world: int) -> None:
    tensor = symmetric(ELEMENTS)
    for _ in range(3):
        if rank == 1:
            with pytest.raises(RuntimeError):
                ops.two_shot_all_reduce_(torch.ones(ELEMENTS), "sum", WORLD)
        ops.two_shot_all_reduce_(tensor.fill_(1), "sum", WORLD)
        assert bool((tensor == world).all())
    # The sleep is longer than a notification takes: no rejection ends the wait of another rank for rank 1 now.
    handle = symm_mem.rendezvous(tensor, WORLD)
    if rank == 1:
        time.sleep(0.3)
        handle.put_signal(0, 1)
    elif rank == 0:
        handle.wait_signal(1, 1)
    handle.barrier()


@pytest.mark.timed
def test_an_operator_that_is_repeated_rightly_disturbs_nobody() -> None:
    run_ranks(repeated_rightly, 3)


@pytest.mark.ranks(2)
def test_what_fails_once_all_have_met_is_not_told(rank: int, world_size: int) -> None:
    """An error on one rank after all have met does not end the others' later waits."""
    tensor, counts = symmetric(ELEMENTS), symmetric(world_size, dtype=torch.int64)
    layout = symmetric(2, world_size).long()
    out = torch.empty(ELEMENTS if rank == 0 else 1)
    if rank == 1:
        with pytest.raises(ValueError, match="out has 1"):
            ops.all_to_all_vdev(tensor, out, counts, layout, WORLD)
        time.sleep(0.3)
    else:
        ops.all_to_all_vdev(tensor, out, counts, layout, WORLD)
    symm_mem.rendezvous(tensor, WORLD).barrier()
