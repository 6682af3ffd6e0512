"""torch.ops.symm_mem on CPU tensors, compared with the collectives of the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import init, run_ranks
from test_symm_mem_backend import cpu
from torch_symm._native import load

ops: Any = torch.ops.symm_mem
WORLD = "0"
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.float8_e4m3fn,
]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values that are the same in every run and different on each rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 7, shape, generator=generator).to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The result of the group's own all-reduce."""
    result = tensor.clone()
    dist.all_reduce(result)
    return result


@pytest.mark.parametrize("world", [2, 4])
def test_all_reduces_have_the_bits_of_the_collective(world: int) -> None:
    def body(rank: int, world: int) -> None:
        for dtype in DTYPES:
            for count in (1, 7, 1000, 70_001):
                # Neither at the start of the memory nor aligned.
                tensor = cpu(count + 3, dtype=dtype)[3:]
                given = values(rank, (count,), dtype)
                tensor.copy_(given)
                expected = raw(summed(tensor))
                what = f"{dtype} {count}"

                assert torch.equal(raw(ops.one_shot_all_reduce(tensor, "sum", WORLD)), expected), what
                out = torch.empty_like(given)
                assert ops.one_shot_all_reduce_out(tensor, "sum", WORLD, out) is out
                assert torch.equal(raw(out), expected), what
                assert torch.equal(raw(tensor), raw(given)), "the input is as it was"

                raw_out = torch.empty_like(given)
                ops.two_shot_all_reduce_out(tensor, "sum", WORLD, raw_out)
                assert torch.equal(raw(raw_out), expected), what

                tensor.zero_()
                assert torch.equal(raw(ops.one_shot_all_reduce_copy(tensor, given, "sum", WORLD)), expected), what
                tensor.zero_()
                ops.one_shot_all_reduce_copy_out(tensor, given, "sum", WORLD, out.zero_())
                assert torch.equal(raw(out), expected), what

                tensor.copy_(given)
                assert ops.two_shot_all_reduce_(tensor, "sum", WORLD) is tensor
                assert torch.equal(raw(tensor), expected), what

    run_ranks(body, world, timeout=120)


def test_inputs_may_be_overwritten_at_once() -> None:
    """No rank returns while another still reads its input."""

    def body(rank: int, world: int) -> None:
        tensor = cpu(3000)
        for turn in range(100):
            tensor.fill_(turn + rank)
            expected = world * turn + sum(range(world))
            result = ops.one_shot_all_reduce(tensor, "sum", WORLD)
            tensor.fill_(-1e6)
            assert bool((result == expected).all())
            tensor.fill_(turn + rank)
            ops.two_shot_all_reduce_(tensor, "sum", WORLD)
            assert bool((tensor == expected).all())

    run_ranks(body, 4)


@pytest.mark.parametrize("world", [2, 4])
def test_reduce_scatter(world: int) -> None:
    def body(rank: int, world: int) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = cpu(12 * world, dtype=dtype)
            tensor.copy_(values(rank, (12 * world,), dtype))
            out = torch.empty(12, dtype=dtype)
            expected = summed(tensor)
            assert ops.reduce_scatter_out(tensor, WORLD, False, out) is out
            assert torch.equal(out, expected.chunk(world)[rank])

            rows = cpu(5, 3, 4 * world, dtype=dtype)
            rows.copy_(values(rank, (5, 3, 4 * world), dtype))
            part = torch.empty(5, 3, 4, dtype=dtype)
            expected = summed(rows)
            ops.reduce_scatter_out(rows, WORLD, True, part)
            assert torch.equal(part, expected.chunk(world, dim=-1)[rank])

    run_ranks(body, world)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("backend", ["symm", "gloo"])
def test_low_contention_collectives(backend: str, symmetric: bool) -> None:
    """The operators also take plain tensors and tensors that are not contiguous."""

    def body(rank: int, world: int) -> None:
        load()
        init(rank, world, backend)
        wait: Callable[[torch.Tensor], torch.Tensor] = torch.ops._c10d_functional.wait_tensor
        tensor = cpu(4 * world, 6) if symmetric else torch.empty(4 * world, 6)
        for value in (tensor, tensor[:, ::2], tensor[world:]):
            value.copy_(values(rank, tuple(value.shape), torch.float32))
            gathered = wait(ops._low_contention_all_gather(value, WORLD))
            peers = [values(peer, tuple(value.shape), torch.float32) for peer in range(world)]
            assert torch.equal(gathered, torch.cat(peers))
            for reduce_op in ("sum", "avg"):
                result = wait(ops._low_contention_reduce_scatter(value, reduce_op, WORLD))
                expected = sum(peers) / (world if reduce_op == "avg" else 1)
                torch.testing.assert_close(result, expected.chunk(world)[rank])
        with pytest.raises(ValueError, match=r"reduce_op \(max\) is not supported"):
            ops._low_contention_reduce_scatter(tensor, "max", WORLD)
        with pytest.raises(RuntimeError, match="cannot be divided among 2 ranks"):
            ops._low_contention_reduce_scatter(tensor[:3], "sum", WORLD)

    run_ranks(body, 2, backend=None)


@pytest.mark.parametrize("world", [2, 4])
def test_all_to_all_with_splits_in_memory(world: int) -> None:
    def body(rank: int, world: int) -> None:
        generator = torch.Generator().manual_seed(7)
        for turn in range(10):
            # splits[i][j]: rows from rank i to rank j.
            splits = torch.randint(0, 6, (world, world), generator=generator)
            if turn == 0:
                splits.zero_()
            tensor, out = cpu(5 * world, 3), cpu(5 * world * world, 3)
            in_splits = cpu(world, dtype=torch.int64)
            layout = cpu(2, world, dtype=torch.int64)
            tensor.copy_(values(rank, tuple(tensor.shape), torch.float32))
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

    run_ranks(body, world)


def test_splits_that_lie_are_refused() -> None:
    """A peer's splits define where this rank reads, so all ranks reject wrong ones before anything is written."""

    def body(rank: int, world: int) -> None:
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

    run_ranks(body, 2)


def test_remote_tensors_of_a_view() -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(6, 4)
        tensor.copy_(values(rank, (6, 4), torch.float32))
        dist.barrier()
        remote = ops.get_remote_tensors(tensor[2:4], WORLD)
        assert [tuple(one.shape) for one in remote] == [(2, 4)] * world
        dist.barrier()
        for peer, one in enumerate(remote):
            assert torch.equal(one, values(peer, (6, 4), torch.float32)[2:4])
        assert remote[rank].data_ptr() == tensor[2:4].data_ptr()
        dist.barrier()

    run_ranks(body, 2)


def test_words() -> None:
    def body(rank: int, world: int) -> None:
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

    run_ranks(body, 1)


def test_arguments_are_checked_as_torch_does() -> None:
    """Each rank rejects independently, before it waits for another."""

    def body(rank: int, world: int) -> None:
        tensor = cpu(4, 8)
        out = torch.empty(4, 8)
        plain = torch.ones(4, 8)
        flat = cpu(31)
        splits, layout = cpu(world, dtype=torch.int64), cpu(2, world, dtype=torch.int64)
        for bad, message in (
            (lambda: ops.one_shot_all_reduce(tensor, "avg", WORLD), "one_shot_all_reduce: only sum is supported"),
            (lambda: ops.one_shot_all_reduce(tensor.t(), "sum", WORLD), "all_reduce: input must be contiguous"),
            (lambda: ops.one_shot_all_reduce(plain, "sum", WORLD), "input must be allocated with empty_strided_p2p"),
            (lambda: ops.one_shot_all_reduce_out(tensor, "sum", WORLD, out[1:]), "input/output size mismatch"),
            (lambda: ops.one_shot_all_reduce_out(tensor, "sum", WORLD, out.double()), "the output Double"),
            (lambda: ops.one_shot_all_reduce_out(tensor, "sum", WORLD, tensor), "refer to a single memory location"),
            (lambda: ops.two_shot_all_reduce_(plain, "sum", WORLD), "two_shot_all_reduce: input must be allocated"),
            (lambda: ops.two_shot_all_reduce_(tensor, "max", WORLD), "two_shot_all_reduce: only sum is supported"),
            (lambda: ops.two_shot_all_reduce_out(tensor, "sum", WORLD, out[1:]), "input/output size mismatch"),
            (lambda: ops.reduce_scatter_out(tensor, WORLD, False, out), "reduce_scatter expected 1D input"),
            (lambda: ops.reduce_scatter_out(flat, WORLD, False, out), "expected number of elements to be divisible"),
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
        assert bool((ops.one_shot_all_reduce(tensor.fill_(1), "sum", WORLD) == world).all())

    run_ranks(body, 2)
