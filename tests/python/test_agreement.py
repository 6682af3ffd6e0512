"""P7: ranks that disagree on a call all raise the same error, which names their calls, and no tensor was written."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import meet, run_ranks

WORLD = 3
MAX, SUM, AVG = dist.ReduceOp.MAX, dist.ReduceOp.SUM, dist.ReduceOp.AVG

#: What this rank's calls were given, and what it held.
made: list[tuple[torch.Tensor, torch.Tensor]] = []


def some(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that must not change."""
    tensor = torch.arange(count).to(dtype) + dist.get_rank()
    made.append((tensor, tensor.clone()))
    return tensor


def splits(odd: int) -> None:
    """Rank 0 sends 3 elements to rank 1, which expects 2; all else fits."""
    rank = dist.get_rank()
    sent = [1, 3, 1] if rank == 0 else [1, 1, 1]
    received = [2, 1, 1] if rank == 1 else [1, 1, 1]
    dist.all_to_all_single(some(sum(received)), some(sum(sent)), received, sent)


def order(odd: int) -> None:
    calls = [lambda: dist.broadcast(some(8), 2), lambda: dist.all_reduce(some(8))]
    for call in reversed(calls) if odd else calls:
        call()


def lists(odd: int) -> None:
    """The sum is the same everywhere, the single lengths are not."""
    lengths = [2, 3, 1] if odd else [1, 3, 2]
    dist.all_gather([some(length) for length in lengths], some(lengths[dist.get_rank()]))


def rooted(call: Callable[..., object], root: int) -> None:
    pieces = [some(4) for _ in range(WORLD)] if dist.get_rank() == root else None
    call(some(4), pieces, root)


#: What each rank calls; rank 1 is the odd one. What the message holds beside the ranks.
MISMATCHES: dict[str, tuple[Callable[[int], object], tuple[str, ...]]] = {
    "collective": (
        lambda odd: dist.all_reduce(some(4)) if odd else dist.broadcast(some(4), 0),
        (r"all_reduce\(4 . float32, 16 bytes, SUM\)", r"broadcast\(4 . float32, 16 bytes, root 0\)"),
    ),
    "barrier": (lambda odd: dist.all_reduce(some(4)) if odd else dist.barrier(), (r"all_reduce\(", "barrier")),
    "order": (order, (r"all_reduce\(8", r"broadcast\(8")),
    "size, by one": (lambda odd: dist.all_reduce(some(4 + odd)), ("16 bytes", "20 bytes")),
    "size, smaller": (lambda odd: dist.all_reduce(some(9 - odd)), ("36 bytes", "32 bytes")),
    "size, another way": (lambda odd: dist.all_reduce(some(4 + odd * 1_000_000)), ("16 bytes", "4000016 bytes")),
    "size, 16 and 20 MB": (lambda odd: dist.all_reduce(some((4 + odd) << 20)), ("16777216 bytes", "20971520 bytes")),
    "dtype of one width": (
        lambda odd: dist.all_reduce(some(4, torch.int32 if odd else torch.float32)),
        ("float32", "int32"),
    ),
    "dtype of another width": (
        lambda odd: dist.all_reduce(some(4, torch.float64 if odd else torch.float32)),
        (r"4 . float32", r"4 . float64"),
    ),
    "dtype of as many bytes": (
        lambda odd: dist.all_reduce(some(2, torch.int64) if odd else some(4, torch.int32)),
        (r"2 . int64", r"4 . int32"),
    ),
    "reduce op": (lambda odd: dist.all_reduce(some(4), MAX if odd else SUM), ("SUM", "MAX")),
    "reduce op of another rank's reduce_scatter": (
        lambda odd: dist.reduce_scatter_tensor(some(4), some(12), AVG if odd else SUM),
        ("SUM", "AVG"),
    ),
    "root of broadcast": (lambda odd: dist.broadcast(some(4), odd), ("root 0", "root 1")),
    "root of reduce": (lambda odd: dist.reduce(some(4), odd), ("root 0", "root 1")),
    "root of gather": (lambda odd: rooted(dist.gather, odd), ("root 0", "root 1")),
    "root of scatter": (lambda odd: rooted(dist.scatter, odd), ("root 0", "root 1")),
    "broadcast size": (lambda odd: dist.broadcast(some(4 - odd), 0), ("16 bytes", "12 bytes")),
    "all_gather size": (
        lambda odd: dist.all_gather_into_tensor(some(3 * (3 + odd)), some(3 + odd)),
        ("36 bytes", "48 bytes"),
    ),
    "all_gather lists": (lists, (r"\[4, 12, 8\]", r"\[8, 12, 4\]")),
    "reduce_scatter size": (
        lambda odd: dist.reduce_scatter_tensor(some(3 + odd), some(3 * (3 + odd))),
        ("36 bytes", "48 bytes"),
    ),
    "splits": (splits, ("12 bytes", "expects 8", "all_to_all")),
    "asynchronous": (lambda odd: dist.all_reduce(some(4 + odd), async_op=True).wait(), ("16 bytes", "20 bytes")),
}


def disagree(rank: int, world: int, name: str) -> tuple[str, float]:
    call, _ = MISMATCHES[name]
    dist.all_reduce(torch.zeros(3))
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(torch_symm.SymmMismatch) as error:
        call(int(rank == 1))
    took = time.monotonic() - start
    assert isinstance(error.value, dist.DistBackendError)
    for tensor, before in made:
        assert torch.equal(tensor, before), "written"
    with pytest.raises(torch_symm.SymmMismatch) as again:
        dist.barrier()
    assert str(again.value) == str(error.value)
    return str(error.value), took


@pytest.mark.timed
@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_disagree_all_raise_the_same_and_nothing_is_written(name: str) -> None:
    results = run_ranks(disagree, WORLD, name)
    text, _ = results[0]
    for part in (*MISMATCHES[name][1], r"rank 0 \(pid \d+\)", r"rank 1 \(pid \d+\)", "#3", "of group"):
        assert re.search(part, text), (part, text)
    assert [other for other, _ in results] == [text] * WORLD
    took = max(took for _, took in results)
    print(f"{name}: raised within {took * 1000:.1f} ms")
    assert took < 1
    assert "".join(results.logs) == "", "quiet"


def message_too_long(rank: int, world: int) -> None:
    if rank == 0:
        dist.send(some(300), 1)
    elif rank == 1:
        with pytest.raises(torch_symm.SymmMismatch, match=r"1200 bytes.*800|800 bytes.*1200") as error:
            dist.recv(some(200), 0)
        assert "rank 0" in str(error.value)
    for tensor, before in made:
        assert torch.equal(tensor, before), "written"
    meet("compared", rank, world)
    with pytest.raises(torch_symm.SymmMismatch, match="sent 1200 bytes"):
        dist.barrier()


def test_a_short_message_of_another_size_raises_on_its_receiver_not_in_the_send() -> None:
    run_ranks(message_too_long, WORLD)
