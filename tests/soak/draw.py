"""The content of a round, drawn only from the seed and the round's number: every process draws the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import expected
import torch

#: Operations between one rank and the others of a group.
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "coalesced",
    "barrier",
    "monitored_barrier",
    "objects",
)
MESSAGES = ("messages", "batch")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "coalesced")
LAYOUTS = ("contiguous", "contiguous", "strided", "transposed", "offset")
STORES = ("file", "url", "torch", "socket")

#: The faults, their weights, and the phase in which the supervisor sends the signal; "" if the victim acts itself.
FAULTS = {
    "none": (6, ""),
    "kill": (5, "storm"),
    "kill two": (1, "storm"),
    "kill with a child": (2, "storm"),
    "exit": (3, ""),
    "abort": (4, ""),
    "leave": (4, ""),
    "stop for a while": (2, "storm"),
    "stop for long": (1, "storm"),
    "late": (1, ""),
    "mismatch": (4, ""),
    "argument": (1, ""),
    "fork": (4, ""),
    "kill joining": (3, "join"),
    "stop joining": (1, "join"),
    "kill leaving": (3, "leave"),
}
LETHAL = ("kill", "kill two", "kill with a child", "exit", "kill joining", "kill leaving")
#: Faults that no rank may notice.
HARMLESS = ("none", "stop for a while", "fork", "kill leaving")
#: Faults that other ranks notice by their timeout.
SLOW = ("stop for long", "late", "stop joining")
VARIANTS = {
    "abort": ("thread", "here"),
    "leave": ("thread", "here", "all"),
    "exit": ("code 0", "code 3", "in order", "segfault"),
    "mismatch": ("size", "large size", "dtype", "op", "collective", "barrier", "root"),
    "fork": ("exit", "exit in order", "use", "destroy", "live on"),
}


@dataclass(frozen=True)
class Call:
    """One call of every member of a group."""

    kind: str
    group: int
    dtype: torch.dtype
    count: int
    op: str
    root: int
    layout: str
    background: bool
    #: The number of further calls that are started before this one is awaited.
    linger: int
    seed: int


@dataclass(frozen=True)
class Fault:
    """The fault, its victims and its time."""

    kind: str
    variant: str = ""
    victims: tuple[int, ...] = ()
    #: The group in which the fault happens.
    group: int = 0
    #: Seconds from the start of the phase.
    delay: float = 0.0
    #: Seconds for which a victim is stopped.
    seconds: float = 0.0
    #: The index of the call at which a victim acts.
    at: int = 0

    @property
    def phase(self) -> str:
        return FAULTS[self.kind][1]


@dataclass(frozen=True)
class Program:
    """A round."""

    seed: int
    number: int
    #: The process of each rank.
    order: tuple[int, ...]
    store: str
    timeout: float
    #: The ranks of each group; the first is the default group.
    groups: tuple[tuple[int, ...], ...]
    before: tuple[Call, ...]
    storm: tuple[Call, ...]
    fault: Fault
    ending: str
    after: tuple[Call, ...] = field(repr=False)

    @property
    def world(self) -> int:
        return len(self.order)

    @property
    def survivors(self) -> tuple[int, ...]:
        dead = self.fault.victims if self.fault.kind in LETHAL else ()
        return tuple(rank for rank in range(self.world) if rank not in dead)

    def spoiled(self, group: int) -> bool:
        """Returns true if the fault also ends this group."""
        kind, members = self.fault.kind, self.groups[group]
        if kind in HARMLESS:
            return False
        if kind in LETHAL or (kind == "leave" and self.fault.variant == "all"):
            return any(victim in members for victim in self.fault.victims)
        return group == self.fault.group


def moved(call: Call, group: int, root: int) -> Call:
    """The same call in another group."""
    return replace(call, group=group, root=root)


def program(seed: int, number: int, world: int, only: str = "") -> Program:
    """The round ``number`` of ``seed``; ``only``: always this fault."""
    dice = random.Random(f"{seed}/{number}")
    order = list(range(world))
    dice.shuffle(order)
    kind = dice.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])[0]
    kind = only or kind
    # Process 0 lives as long as the run, so that leaks become visible.
    able = [rank for rank in range(world) if kind not in LETHAL or order[rank] != 0]
    victims = tuple(dice.sample(able, min(2 if kind == "kill two" else 1, len(able))))
    groups = [tuple(range(world))]
    for _ in range(dice.choices((0, 1, 3, 20), (4, 4, 3, 1))[0]):
        members = set(dice.sample(range(world), dice.randint(1, world)))
        # A rank that fails while joining gives up; ranks that join a group without the victim would wait for it.
        members |= set(victims) if FAULTS[kind][1] == "join" else set()
        groups.append(tuple(sorted(members)))
    struck = [g for g, members in enumerate(groups) if set(victims) <= set(members) and len(members) > len(victims)]
    variant = dice.choice(VARIANTS.get(kind, ("",)))
    hit = 0 if variant == "all" else dice.choice(struck)
    slow = kind in SLOW
    timeout = 2.5 if slow or FAULTS[kind][1] == "join" else 40.0
    largest = 1 << 16 if slow else 8 << 20
    storms = [hit] if kind not in ("kill", "kill two", "kill with a child", "exit", *HARMLESS) else struck
    storms = list(range(len(groups))) if kind in HARMLESS else storms
    fault = Fault(
        kind,
        variant,
        () if kind == "none" else victims,
        hit,
        dice.choice((0.0, 0.001, 0.01, 0.05, 0.2)) * dice.random(),
        timeout + 2 if slow else dice.uniform(0.02, 1.5),
        dice.randrange(8),
    )
    # A message's timeout does not fail its group, so other ranks would not get the fault's error in time.
    kinds = COLLECTIVES if slow else (*COLLECTIVES, *MESSAGES)
    everywhere = list(range(len(groups)))
    storm = _calls(dice, dice.randint(8, 20), kinds, groups, storms, largest)
    # In this all_reduce the fault's error reaches a rank that no message of the other ranks involves.
    storm += tuple(replace(storm[0], kind="all_reduce", group=group, count=16, root=0) for group in storms)
    return Program(
        seed,
        number,
        tuple(order),
        dice.choice(STORES),
        timeout,
        tuple(groups),
        _calls(dice, dice.randint(2, 16), kinds, groups, everywhere, largest),
        storm,
        fault,
        dice.choice(("destroy", "destroy", "abort", "one by one")),
        _calls(dice, 3, kinds, [tuple(range(world))], [0], 1 << 16),
    )


def _calls(
    dice: random.Random,
    number: int,
    kinds: tuple[str, ...],
    groups: list[tuple[int, ...]],
    chosen: list[int],
    largest: int,
) -> tuple[Call, ...]:
    calls = []
    for _ in range(number):
        kind = dice.choice(kinds)
        group = dice.choice(chosen)
        dtype = dice.choice(expected.DTYPES)
        top = dice.choices((1, 64, 4 << 10, 100 << 10, 2 << 20, 8 << 20), (2, 10, 8, 5, 2, 1))[0]
        count = dice.randrange(min(top, largest)) // dtype.itemsize
        ops = [op for op in expected.OPS if expected.served(op, dtype)]
        calls.append(
            Call(
                kind,
                group,
                dtype,
                count,
                dice.choice(ops),
                dice.randrange(len(groups[group])),
                dice.choice(LAYOUTS),
                dice.random() < 0.4,
                dice.randrange(4),
                dice.randrange(1 << 40),
            )
        )
    return tuple(calls)
