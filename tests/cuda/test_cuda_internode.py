"""CUDA tensors of multi-node groups with NCCL between nodes, compared with the two-level definition: bit for bit.

The ranks of one machine act as the nodes (``SYMM_TEST_NODE``): ranks with even numbers are on ``a``, the others on
``b``. For NCCL every rank is a separate node (``NCCL_HOSTID``), so that it uses sockets, and ranks may share a GPU.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import expected
import pytest
import torch
import torch.distributed as dist
import torch_symm
from cases import CPU, Case
from collectives import MOVING, REDUCING, ROOTED, run
from pool import DEVICE, GPUS, PLACES, Pool, captured, device, init, meet

needs_nodes = pytest.mark.skipif(
    DEVICE != "cuda" or GPUS < 1 or PLACES < 4, reason="needs four GPUs, or one and SYMM_ALLOW_SHARED_GPUS=1"
)
pytestmark = needs_nodes

#: Numbers of ranks: the two nodes have (1, 1), (2, 1) and (2, 2) of them.
WORLDS = (2, 3, 4)
#: Numbers of elements: none, one, a few, and, in float32, enough for one rail and for all rails.
COUNTS = (0, 1, 37, 4099, 33_001)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Pool]:
    """Rank processes only for these tests, because a process keeps its node until it exits."""
    shared = Pool(4)
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def compared() -> Iterator[Pool]:
    """Rank processes whose setting SYMM_DEBUG compares calls between nodes; a process reads it only once."""
    shared = Pool(2)
    yield shared
    shared.stop()


def run_nodes(
    pool: Pool,
    fn: Callable[..., Any],
    world: int,
    timeout: float = 60,
    choice: str = "auto",
    debug: str = "",
    reduce_dtype: str = "tensor",
    **options: Any,
) -> list[Any]:
    """``Pool.run`` on nodes; ``timeout``: of the default group, in seconds."""
    return pool.run(_on_node, world, fn, choice, timeout, debug, reduce_dtype, backend=None, timeout=120, **options)


def _on_node(
    rank: int, world: int, fn: Callable[..., Any], choice: str, timeout: float, debug: str, reduce_dtype: str
) -> Any:
    os.environ["SYMM_DEBUG"] = debug
    os.environ["SYMM_TEST_NODE"] = "ab"[rank % 2]
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_HOSTID"] = f"symm-test-{rank}"
    os.environ["NCCL_IB_DISABLE"] = "1"
    options = torch_symm.Options(timeout=timeout, inter_node_backend=choice, reduce_dtype=reduce_dtype)
    init(rank, world, timeout=timeout, options=options)
    return fn(rank, world)


def two_level(op: str, inputs: Sequence[torch.Tensor], factors: Sequence[float] = ()) -> torch.Tensor:
    """Reduces the ranks of each node in order and rounds once, then reduces the nodes in order and rounds once."""
    return expected.two_level(op, inputs, factors or [1.0] * len(inputs), [rank % 2 for rank in range(len(inputs))])


def of_nodes() -> dict[str, Any]:
    """The reference and the device of a case."""
    return {"reference": two_level, "device": device()}


def served(op: str, dtype: torch.dtype) -> bool:
    """Returns true if the reduction has the bits of CPU tensors; on CUDA, senders round narrow products."""
    return expected.served(op, dtype) and (op != "PREMUL_SUM" or dtype not in expected.NARROW)


def reductions(rank: int, world: int) -> int:
    """Every case with GPU tensors, and each all_reduce except long ones also with CPU tensors in the same group."""
    cases = [(op, torch.float32, count) for op in ("SUM", "AVG", "PREMUL_SUM") for count in COUNTS]
    cases += [(op, dtype, 37) for dtype in expected.DTYPES for op in expected.OPS if served(op, dtype)]
    here, there = of_nodes(), {**of_nodes(), "device": CPU}
    found = run(
        (form, Case(rank, world, dtype, count, op=op, root=world - 1, **options))
        for op, dtype, count in cases
        for form, options in (*((form, here) for form in REDUCING), ("all_reduce", there))
    )
    long = [("SUM", torch.bfloat16, 300_001), ("AVG", torch.float16, 1_000_003)]
    return found + run(("all_reduce", Case(rank, world, dtype, count, op=op, **here)) for op, dtype, count in long)


def rounded_once(rank: int, world: int) -> int:
    """Sums of narrow floats, which travel as float32, have the bits of CPU tensors; other sums do not change."""
    narrow = sorted(expected.NARROW, key=str)
    cases = [(op, dtype, 37) for dtype in narrow for op in ("SUM", "AVG", "PREMUL_SUM", "MAX")]
    cases += [("SUM", torch.bfloat16, count) for count in COUNTS] + [("AVG", torch.float16, 300_001)]
    cases += [("SUM", torch.float32, 4099), ("SUM", torch.int32, 4099)]
    for op, dtype, count in cases:
        if not expected.served(op, dtype):
            continue
        reduce_op = expected.op_of(op, rank + 0.5)
        for begin in (0, 1):
            about = (op, dtype, count, begin, rank)
            on_host = expected.seeded(dtype, (count + begin,), rank)[begin:].clone()
            got = expected.seeded(dtype, (count + begin,), rank).to(device())[begin:]
            dist.all_reduce(on_host, reduce_op)
            dist.all_reduce(got, reduce_op)
            expected.assert_same_bits(got.cpu(), on_host, ("all_reduce", *about))
            given = expected.seeded(dtype, (world * count,), 50 + rank)
            half, whole = torch.empty(count, dtype=dtype), given.to(device())
            mine = torch.empty(count, dtype=dtype, device=device())
            dist.reduce_scatter_tensor(half, given, reduce_op)
            dist.reduce_scatter_tensor(mine, whole, reduce_op)
            expected.assert_same_bits(mine.cpu(), half, ("reduce_scatter", *about))
            expected.assert_same_bits(whole.cpu(), given, ("inputs stay", *about))
            there, here = (expected.seeded(dtype, (count,), rank).to(where) for where in (device(), "cpu"))
            dist.reduce(there, 0, reduce_op)
            dist.reduce(here, 0, reduce_op)
            expected.assert_same_bits(there.cpu(), here, ("reduce", *about))
    graph, tensor = torch.cuda.CUDAGraph(), torch.ones(5000, dtype=torch.bfloat16, device=device())
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((tensor == world).all())
    return len(cases)


@pytest.mark.timed
@pytest.mark.parametrize("world", WORLDS)
def test_sums_that_are_rounded_once_have_the_bits_of_cpu_tensors(nodes: Pool, world: int) -> None:
    assert min(run_nodes(nodes, rounded_once, world, reduce_dtype="float32")) > 20


def phases(rank: int, world: int) -> None:
    """The flight recorder reports for calls on GPUs what the host knows without a query of the GPU."""
    tensor = torch.ones(1000, device=device())
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    time.sleep(0.2)
    before = [call for call in torch_symm.trace()["calls"] if call["op"] == "all_reduce"][-1]
    assert (before["state"], before["phase"], before["sequence"]) == ("completed", None, 1), before
    meet("done", rank, world)
    if rank % 2:
        time.sleep(1.0)
    dist.all_reduce(tensor)
    if not rank % 2:
        time.sleep(0.3)
        last = [call for call in torch_symm.trace()["calls"] if call["op"] == "all_reduce"][-1]
        assert (last["state"], last["sequence"]) == ("started", 2), last
        assert last["phase"].startswith('begun on the GPU, inside the node or on rail 0 with node "b"'), last
    torch.cuda.synchronize()
    assert bool((tensor == world * world).all())


@pytest.mark.timed
def test_the_flight_recorder_tells_how_far_a_call_on_gpus_is(nodes: Pool) -> None:
    run_nodes(nodes, phases, 2)


def movements(rank: int, world: int) -> None:
    for dtype, count in [(torch.float32, count) for count in COUNTS] + [(torch.int8, 37), (torch.complex128, 5)]:
        forms = (*MOVING, *("reduce_scatter_tensor",) * (not dtype.is_complex))
        run((form, Case(rank, world, dtype, count, **of_nodes())) for form in forms)
        run(
            (form, Case(rank, world, dtype, count, root=root, **of_nodes())) for root in range(world) for form in ROOTED
        )
    dist.barrier()
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": other} for other in range(world)]


def orders(rank: int, world: int) -> None:
    """Strided, asynchronous and coalesced calls, on several streams."""
    inputs = [expected.seeded(torch.float32, (40, 30), other) for other in range(world)]
    wanted, mine = two_level("SUM", inputs), inputs[rank].to(device())
    strided = mine.t().contiguous().t()
    dist.all_reduce(strided)
    expected.assert_same_bits(strided.cpu(), wanted, "strided")
    many, coalesced, on_streams = ([mine.clone() for _ in range(count)] for count in (5, 3, 6))
    works = [dist.all_reduce(tensor, async_op=True) for tensor in many]
    dist.barrier()
    for work in works:
        work.wait()
    (got,) = dist.all_reduce(mine.clone(), async_op=True).get_future().wait()
    expected.assert_same_bits(got.cpu(), wanted, "future")
    with dist._coalescing_manager(device=device()):
        for tensor in coalesced:
            dist.all_reduce(tensor)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for at, tensor in enumerate(on_streams):
        with torch.cuda.stream(streams[at % 3]):
            dist.all_reduce(tensor, async_op=at % 2 == 1).wait() if at % 2 else dist.all_reduce(tensor)
    torch.cuda.synchronize()
    for about, tensors in (("asynchronous", many), ("coalesced", coalesced), ("on streams", on_streams)):
        for tensor in tensors:
            expected.assert_same_bits(tensor.cpu(), wanted, about)


def messages(rank: int, world: int) -> None:
    """Sends and receives within and between nodes."""
    after, before = (rank + 1) % world, (rank - 1) % world
    for count in (1, 5000, 3_000_001):
        parts = [expected.seeded(torch.float32, (count,), other) for other in range(world)]
        mine, got = parts[rank].to(device()), torch.empty(count, device=device())
        ring = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        expected.assert_same_bits(got.cpu(), parts[before], ("ring", count))
        # From one node to the other, and back.
        if rank in (0, 1):
            got.zero_()
            for sender in (0, 1):
                dist.send(mine, 1 - rank) if rank == sender else dist.recv(got, 1 - rank)
            expected.assert_same_bits(got.cpu(), parts[1 - rank], ("there and back", count))
            assert [call["peer"] for call in torch_symm.trace()["calls"] if call["internode"]][-2:] == [1 - rank] * 2
        everybody = [torch.empty(count, device=device()) for _ in range(2 * world)]
        batch = []
        turns = [(other, turn) for other in range(world) if other != rank for turn in range(2)]
        for other, turn in turns:
            batch.append(dist.P2POp(dist.isend, mine + turn, other))
            batch.append(dist.P2POp(dist.irecv, everybody[2 * other + turn], other))
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        for other, turn in turns:
            wanted, about = parts[other] + turn, ("everybody", other, turn, count)
            expected.assert_same_bits(everybody[2 * other + turn].cpu(), wanted, about)
    graph = captured(lambda: [work.wait() for work in dist.batch_isend_irecv(ring)])
    got.zero_()
    mine.add_(1)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    expected.assert_same_bits(got.cpu(), parts[before] + 1, "graph")
    dist.barrier()


def sizes(rank: int, world: int) -> None:
    """The sum has the same bits at every length: a prefix of a longer sum is equal."""
    count = 5_000_001
    inputs = [expected.seeded(torch.float16, (count,), other) for other in range(world)]
    wanted = two_level("SUM", inputs)
    for length in (1, 1000, 32 << 10, (32 << 10) + 1, 600_000, count):
        got = inputs[rank][:length].to(device())
        dist.all_reduce(got)
        expected.assert_same(got.cpu(), wanted[:length], length)
    # The calls are enqueued after much other work, and the host continues.
    got = inputs[rank][:1000].to(device())
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    begun = time.monotonic()
    dist.all_reduce(got)
    took = time.monotonic() - begun
    assert not torch.cuda.current_stream().query(), "the GPU sleeps"
    assert took < 0.2, f"the host was blocked for {took:.3f} s"
    expected.assert_same(got.cpu(), wanted[:1000], "behind a sleep")


def graphs(rank: int, world: int) -> None:
    fresh = torch.full((100,), float(rank), device=device())
    graph = torch.cuda.CUDAGraph()
    message = "which a CUDA graph cannot record: call one before"
    with pytest.raises(torch_symm.SymmConfigError, match=message), torch.cuda.graph(graph):
        dist.all_reduce(fresh)
    torch.cuda.synchronize()
    count = 5003
    inputs = [expected.seeded(torch.float32, (count,), other) for other in range(world)]
    mine = inputs[rank].to(device())
    wide, exchanged = torch.empty(world * count, device=device()), torch.empty(world * count, device=device())
    part, copied, later = torch.empty(count, device=device()), mine.clone(), mine.clone()

    def body() -> None:
        summed = mine * 1
        dist.all_reduce(summed)
        dist.all_gather_into_tensor(wide, mine)
        dist.reduce_scatter_tensor(part, wide)
        dist.broadcast(copied, 1)
        dist.all_to_all_single(exchanged, wide)
        work = dist.all_reduce(later, async_op=True)
        work.wait()
        results.copy_(summed)

    results = torch.empty(count, device=device())
    graph = captured(body)
    for number in range(3):
        inputs = [expected.seeded(torch.float32, (count,), 100 * number + other) for other in range(world)]
        mine.copy_(inputs[rank])
        copied.copy_(inputs[rank])
        later.copy_(inputs[rank])
        graph.replay()
        torch.cuda.synchronize()
        wanted = two_level("SUM", inputs)
        expected.assert_same_bits(results.cpu(), wanted, "all_reduce")
        expected.assert_same_bits(later.cpu(), wanted, "asynchronous all_reduce")
        expected.assert_same_bits(wide.cpu(), torch.cat(inputs), "all_gather")
        expected.assert_same_bits(copied.cpu(), inputs[1], "broadcast")
        own = torch.cat(inputs)[rank * count : (rank + 1) * count]
        expected.assert_same(part.cpu(), two_level("SUM", [own] * world), "reduce_scatter")
        expected.assert_same_bits(exchanged.cpu(), own.repeat(world), "all_to_all")
        eager = inputs[rank].to(device())
        dist.all_reduce(eager)
        expected.assert_same_bits(eager.cpu(), wanted, "between replays")


def eager(rank: int, world: int) -> None:
    """A graph may at once use the connections that ``device_id=`` makes at the start."""
    assert dist.group.WORLD is not None
    dist.group.WORLD._get_backend(device()).eager_connect_single_device(device())
    tensor, given = torch.empty(1000, device=device()), torch.full((1000,), float(rank), device=device())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.copy_(given)
        dist.all_reduce(tensor)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.all(tensor == sum(range(world)))


def training(rank: int, world: int) -> None:
    """DistributedDataParallel: the same parameters on every rank, as in one process with all the data."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 200), torch.nn.Tanh(), torch.nn.Linear(200, 3)]
    alone = torch.nn.Sequential(*layers).to(device())
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
    data = torch.randn(world, 10, 64, device=device())
    steps = [(torch.optim.SGD(each.parameters(), lr=0.1), each) for each in (alone, model)]
    for _ in range(3):
        for (optimizer, each), given in zip(steps, (data.reshape(-1, 64), data[rank]), strict=True):
            optimizer.zero_grad()
            each(given).square().mean().backward()
            optimizer.step()
    mine = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    all_ranks = torch.empty(world, mine.numel(), device=device())
    dist.all_gather_into_tensor(all_ranks, mine)
    assert all(torch.equal(other, mine) for other in all_ranks)
    torch.testing.assert_close(mine, torch.cat([parameter.detach().reshape(-1) for parameter in alone.parameters()]))


def groups(rank: int, world: int) -> None:
    """Groups of the two dimensions of a mesh: the ranks of a node, and one rank of each node."""
    mine = torch.full((1000,), float(rank), device=device())
    halves = [dist.new_group([other for other in range(world) if other % 2 == node]) for node in range(2)]
    for group in (halves[rank % 2], torch_symm.intra_node_group()):
        got = mine.clone()
        dist.all_reduce(got, group=group)
        assert torch.all(got == sum(other for other in range(world) if other % 2 == rank % 2))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world - 1, 2)]
    if rank // 2 < len(pairs):
        got = mine.clone()
        dist.all_reduce(got, group=pairs[rank // 2])
        assert torch.all(got == 2 * (rank - rank % 2) + 1), got


def fails(call: Callable[[], object], kind: type[Exception], text: str, within: float) -> None:
    """Repeats a call until the host learns of a failure and the call raises, in less than ``within`` seconds."""
    begun = time.monotonic()
    with pytest.raises(kind, match=text):
        while time.monotonic() < begun + 20:
            call()
            time.sleep(0.01)
    assert time.monotonic() < begun + within
    # The waiting kernels have ended.
    torch.cuda.synchronize()


def late(rank: int, world: int) -> None:
    """The ranks of node b do not call."""
    tensor = torch.ones(100_000, device=device())
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank % 2:
        meet("late", rank, world)
        return
    work = dist.all_reduce(tensor, async_op=True)
    fails(work.wait, dist.DistBackendError, r"node \"b\" \(ranks? .*\(timeout\)", 10)
    meet("late", rank, world)


def lonely(rank: int, world: int) -> None:
    """No rank receives the message of rank 0."""
    tensor = torch.ones(1000, device=device())
    if rank == 0:
        message = r"rank 1 \(node \"b\", pid \d+\) has begun no message with this rank for 4.0 s \(timeout\)"
        fails(lambda: dist.send(tensor, 1), dist.DistBackendError, message, 8)
    meet("lonely", rank, world)


def killed(rank: int, world: int) -> None:
    tensor = torch.ones(100_000, device=device())
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    meet("killed", rank, world)
    if rank == world - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), 9)
    work = dist.all_reduce(tensor, async_op=True)
    fails(work.wait, dist.DistBackendError, rf"rank {world - 1} ", 5)


def mismatched(rank: int, world: int) -> None:
    """Ranks of one node disagree, and all ranks get the error at once."""
    tensor = torch.ones(1000 if rank == 2 else 500_000, device=device())
    called = r"rank (0|2) \(node \"a\".* called reduce_scatter\("
    text = f"{called}.* and {called}"
    fails(lambda: dist.all_reduce(tensor, async_op=True).wait(), torch_symm.SymmMismatchError, text, 5)


def mismatched_between(rank: int, world: int) -> None:
    """Ranks of different nodes disagree, and the error is raised before anything is written."""
    tensor = torch.ones(1000, device=device())
    dist.all_reduce(tensor)
    assert torch.all(tensor == world)
    tensor = torch.ones(1000 + rank, device=device())
    site = r"at \S*test_cuda_internode.py:\d+"
    text = rf"rank 0 .*\(1000 × float32.* {site}, rank 1 .*\(1001 × float32.* {site}"
    with pytest.raises(torch_symm.SymmMismatchError, match=text):
        dist.all_reduce(tensor)
    assert torch.all(tensor == 1)


def told_later(rank: int, world: int) -> None:
    """Ranks of different nodes disagree. No rank waits before it enqueues kernels, so a later call may raise."""
    tensor = torch.ones(1000, device=device())
    for _ in range(100):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    torch.cuda.synchronize()
    node = rank % 2
    differing = torch.ones(1000 + node, device=device())
    text = r"rank 0 .*\(1000 × float32.* as #101, rank 1 .*\(1001 × float32.* as #101"
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmMismatchError, match=text):
        dist.all_reduce(differing)
        while True:
            dist.all_reduce(torch.ones(7, device=device()), async_op=True).wait()
            assert time.monotonic() < begun + 10, "no error came"
            time.sleep(0.01)
    assert time.monotonic() < begun + 5
    torch.cuda.synchronize()


def refused(rank: int, world: int) -> None:
    tensor = torch.ones(10, device=device())
    text = r"all_reduce.*no backend was chosen.*node \"b\".*intra_node_group.*SYMM_INTER_NODE_BACKEND=auto"
    with pytest.raises(NotImplementedError, match=text):
        dist.all_reduce(tensor)


@pytest.mark.parametrize("world", WORLDS)
def test_reductions(nodes: Pool, world: int) -> None:
    assert all(count > 100 for count in run_nodes(nodes, reductions, world))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "scenario", [movements, orders, messages, sizes, graphs, eager, training, groups], ids=lambda fn: fn.__name__
)
def test_calls(nodes: Pool, scenario: Callable[..., Any], world: int) -> None:
    run_nodes(nodes, scenario, world)


#: A body, its number of ranks, and the options of the run.
FAILURES: list[tuple[Callable[..., Any], int, dict[str, Any]]] = [
    *((late, world, {"timeout": 3}) for world in (2, 4)),
    (lonely, 2, {"timeout": 4}),
    *((killed, world, {"killed": (world - 1,)}) for world in (2, 4)),
    (mismatched, 4, {"timeout": 6}),
    (refused, 2, {"choice": "gloo"}),
]


@pytest.mark.parametrize(("body", "world", "options"), FAILURES)
def test_failures(nodes: Pool, body: Callable[..., Any], world: int, options: dict[str, Any]) -> None:
    run_nodes(nodes, body, world, **options)


def test_ranks_of_different_nodes_that_disagree_are_told_under_debug(compared: Pool) -> None:
    run_nodes(compared, mismatched_between, 2, debug="call_site")


# proves P7
@pytest.mark.parametrize("world", (2, 4))
def test_ranks_of_different_nodes_that_disagree_are_told(nodes: Pool, world: int) -> None:
    run_nodes(nodes, told_later, world, timeout=20)
