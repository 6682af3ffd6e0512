"""Where the rank processes of a run meet on the host: the start line, errors, and every rank's samples."""

from __future__ import annotations

from multiprocessing.synchronize import Barrier

import torch

from torch_symm.launch.watch import Progress

MAX_TURNS = 16
MODES = ("graph", "eager", "host", "group", "backend", "launch", "operator", "products", "together")
TEXT_BYTES = 1200
# Longer than a run may stall before the launcher ends it.
PATIENCE_S = 200.0


def _shared(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    tensor: torch.Tensor = torch.zeros(shape, dtype=dtype).share_memory_()  # type: ignore[no-untyped-call]
    return tensor


class Meeting:
    """Memory that all ranks share. All of them call `align`, `agree` and `decide`, in the same order."""

    def __init__(self, world: int, sides: int, barrier: Barrier) -> None:
        """For ``world`` ranks that meet at ``barrier``, and compare ``sides`` sides."""
        self._world = world
        self._barrier = barrier
        self._texts = _shared(world, TEXT_BYTES, dtype=torch.uint8)
        self._samples = _shared(sides, len(MODES), world, MAX_TURNS, dtype=torch.float64)
        self._number = _shared(1, dtype=torch.int64)
        self.progress = Progress(world)

    def align(self) -> None:
        """Returns once all ranks have called it.

        Raises:
            BrokenBarrierError: a rank did not call it within 200 s.
        """
        self._barrier.wait(PATIENCE_S)

    def agree(self, rank: int, error: str | None) -> list[str]:
        """Returns the errors of the ranks that have one, the same on every rank."""
        text = (error or "").encode()[:TEXT_BYTES]
        row = self._texts[rank]
        row.zero_()
        if text:
            row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.align()
        bodies = [bytes(self._texts[other].tolist()).rstrip(b"\0") for other in range(self._world)]
        self.align()
        return [body.decode(errors="replace") for body in bodies if body]

    def decide(self, rank: int, number: int) -> int:
        """Returns rank 0's number on every rank."""
        if rank == 0:
            self._number[0] = number
        self.align()
        found = int(self._number[0])
        self.align()
        return found

    def note(self, side: int, mode: str, rank: int, turn: int, us: float) -> None:
        """Writes this rank's sample."""
        self._samples[side, MODES.index(mode), rank, turn] = us

    def slowest(self, side: int, mode: str, turns: int) -> list[float]:
        """Returns the slowest rank's sample of each turn; after `align`."""
        found: list[float] = self._samples[side, MODES.index(mode), :, :turns].max(dim=0).values.tolist()
        return found
