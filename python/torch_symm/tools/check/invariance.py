"""One rank's part in comparing sums of the same values, to find whether they depend on anything but the values.

They could depend on the length of the call, the run, the rank, the operation or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

import torch
import torch.distributed as dist

from torch_symm.launch.messages import in_a_line

from .rank import GROUP_TIMEOUT, CheckTask
from .reference import reduced
from .sides import TREE, Side, sides

#: Number of elements of the row that every call contains.
ROW = 1_000
#: Lengths of calls that contain the row: from a decode step to a prefill, at least one for each algorithm.
LENGTHS = {"cpu": (4_096, 33_001, 262_144, 1 << 20), "cuda": (4_096, 33_001, 131_072, 524_291, 1 << 21, 1 << 23)}
REPEATS = 5
DTYPES = (torch.float32, torch.bfloat16)
#: Number of values in the sum that is computed by 1, 2, 4 and 8 ranks.
LEAVES = 8
#: The comparisons, in the order of the table.
COLUMNS = ("lengths", "runs", "ranks", "reduce_scatter", "definition", "one rank")

Shares = dict[str, float | None]


@dataclass
class Row:
    """A side in a group of ``ranks``: for each of `COLUMNS` the share of elements that differ, or ``None``."""

    side: str
    ranks: int
    dtype: str
    differ: Shares = field(default_factory=dict)

    @property
    def promised(self) -> tuple[str, ...]:
        """The comparisons in which this side promises equal bits."""
        if not self.side.startswith("symm"):
            return ()
        same = self.side == TREE and self.dtype == "float32" and LEAVES % self.ranks == 0
        return COLUMNS if same else COLUMNS[:-1]

    @property
    def broken(self) -> list[str]:
        """The comparisons in which a promise was broken."""
        return [name for name in self.promised if self.differ.get(name)]


@dataclass
class InvarianceReport:
    """The rows of one rank, why sides are missing, and the error that ended its run."""

    rank: int
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    error: str = ""


def share(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the share of elements whose bits differ."""
    ints = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return float((one.cpu().view(ints) != other.cpu().view(ints)).double().mean())


def tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of ``parts`` as ``order="tree"`` adds them.

    It is the sum of the first h parts plus the sum of the rest, where h is the largest power of two below their number.
    """
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return tree(parts[:half]) + tree(parts[half:])


def defined(side: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the documented sum of ``inputs`` on ``side``, computed on the CPU; in rank order except for `TREE`."""
    return tree([one.float() for one in inputs]).to(inputs[0].dtype) if side == TREE else reduced("SUM", inputs)


def values(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Returns ``count`` rows of values of very different size, so that the bits depend on the order of additions."""
    generator = torch.Generator().manual_seed(3)
    size = 10.0 ** torch.randint(-4, 5, (count, ROW), generator=generator)
    return list((torch.randn((count, ROW), generator=generator) * size).to(dtype))


def merged(ranks: Iterable[list[Row]]) -> list[Row]:
    """Returns one row for each row of several ranks, with the largest share that any rank has found."""
    rows: dict[tuple[str, int, str], Row] = {}
    for row in (row for part in ranks for row in part):
        there = rows.setdefault((row.side, row.ranks, row.dtype), row)
        for name, share in row.differ.items():
            known = there.differ[name]
            there.differ[name] = share if known is None else known if share is None else max(known, share)
    return sorted(rows.values(), key=lambda row: row.ranks)


def main(rank: int, task: CheckTask, _barrier: Barrier, _stop: torch.Tensor, results: Queue[InvarianceReport]) -> None:
    """Entry point of a rank process."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    device, found = torch.device("cpu"), InvarianceReport(rank)
    if task.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "symm",
            init_method=task.rendezvous,
            rank=rank,
            world_size=max(task.worlds),
            timeout=GROUP_TIMEOUT,
            device_id=device if task.device == "cuda" else None,
        )
        for world in task.worlds:
            there, group, missing = sides(world, rank, device)
            found.missing.update(missing)
            if rank < world:
                found.rows += [_compared(side, rank, group, dtype, device) for side in there for dtype in DTYPES]
            dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        found.error = f"rank {rank}: {in_a_line(error)}"
    results.put(found)


def _compared(side: Side, rank: int, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Row:
    world = group.size()
    rows = values(dtype, world)
    own = rows[rank].to(device)
    row = Row(side.name, world, str(dtype).removeprefix("torch."), dict.fromkeys(COLUMNS))
    alone = side.all_reduce(own.clone())
    if alone is None:
        return row
    row.differ["lengths"] = _worst(share(alone, part) for part in _within(side, own))
    row.differ["runs"] = _worst(share(alone, again) for again in _repeated(side, own))
    row.differ["ranks"] = _worst(share(alone, other) for other in _everyone(alone, group))
    scattered = side.reduce_scatter(own.repeat(world))
    row.differ["reduce_scatter"] = None if scattered is None else share(alone, scattered)
    row.differ["definition"] = share(alone, defined(side.name, rows))
    if LEAVES % world == 0 and dtype == torch.float32:
        leaves, each = values(dtype, LEAVES), LEAVES // world
        part = tree(leaves[rank * each : (rank + 1) * each]).to(device)
        total = side.all_reduce(part)
        row.differ["one rank"] = None if total is None else share(total, tree(leaves))
    return row


def _worst(shares: Iterable[float]) -> float | None:
    return max(shares, default=None)


def _within(side: Side, own: torch.Tensor) -> list[torch.Tensor]:
    """All-reduces longer tensors with ``own`` at one of three places; returns the part of each result at that place."""
    parts = []
    for total in LENGTHS[own.device.type]:
        for place in (0, (total - ROW) // 3, total - ROW):
            tensor = torch.ones(total, dtype=own.dtype, device=own.device)
            tensor[place : place + ROW] = own
            result = side.all_reduce(tensor)
            if result is not None:
                parts.append(result[place : place + ROW].clone())
    return parts


def _repeated(side: Side, own: torch.Tensor) -> list[torch.Tensor]:
    again = [side.all_reduce(own.clone()) for _ in range(REPEATS)]
    return [one for one in again if one is not None]


def _everyone(alone: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Returns the result of every rank of ``group``."""
    every = [torch.empty_like(alone) for _ in range(group.size())]
    dist.all_gather(every, alone, group=group)
    return every
