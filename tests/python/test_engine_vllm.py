"""torch_symm.engines.vllm with duck types of vLLM's classes: communicator, fusion, and what makes vLLM use them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm.compile._quantized  # noqa: F401 - once here, because it takes seconds in each rank
import vllm_doubles
from norm_reference import numbers, reference, same_bits
from vllm_doubles import EPS, communicator, vllm_package  # noqa: F401

ON = {"SYMM_VLLM": "1"}
pytestmark = pytest.mark.usefixtures("vllm_package")


@pytest.mark.ranks(3, backend="gloo")
def test_collectives_of_a_tensor_parallel_group(rank: int, world_size: int) -> None:
    logged, com = vllm_doubles.lines(), communicator([[0, 1, 2]])
    all_ = [numbers(each, 6, 4, 6, dtype=torch.bfloat16) for each in range(world_size)]
    own, total = all_[rank], (all_[0].float() + all_[1].float() + all_[2].float()).bfloat16()
    kept = own.clone()
    assert same_bits(com.all_reduce(own), total) and same_bits(own, kept)
    for dim in (0, 1, 2, -1, -3):
        gathered = com.all_gather(own, dim)
        assert gathered.is_contiguous() and same_bits(gathered, torch.cat(all_, dim)), dim
    for dim in (0, 2, -1):
        part = com.reduce_scatter(own, dim)
        assert part.is_contiguous() and same_bits(part, total.chunk(3, dim)[rank].contiguous()), dim
    assert same_bits(com.reduce_scatterv(own, 0), total.chunk(3)[rank])
    assert same_bits(com.reduce_scatterv(own, 0, [1, 0, 5]), total.split([1, 0, 5])[rank])
    sizes = [1, 3, 2]
    rows = [each[: sizes[i]] for i, each in enumerate(all_)]
    assert same_bits(com.all_gatherv(rows[rank], 0, sizes), torch.cat(rows))
    first, second = com.all_gatherv([own, own[:2]])
    assert same_bits(first, torch.cat(all_)) and same_bits(second, torch.cat([each[:2] for each in all_]))
    for dtype in (torch.float8_e4m3fn, torch.bool):
        gathered, wanted = com.all_gather((own > 0).to(dtype), 0), (torch.cat(all_) > 0).to(dtype)
        assert same_bits(gathered.view(torch.uint8), wanted.view(torch.uint8))
    assert com.served == []
    assert [line.startswith("symm ") and "group tp:0" in line for line in logged] == [True] * (rank == 0)
    com.destroy()
    assert com.symm is None and com.served == ["destroy"]
    com.all_reduce(own)
    assert com.served == ["destroy", "all_reduce"]


@pytest.mark.ranks(8, backend="gloo")
def test_two_sets_of_tensor_parallel_groups_beside_pipeline_and_data_parallel_ones(rank: int) -> None:
    vllm_doubles.operators()
    logged = vllm_doubles.lines()
    axes = torch.arange(8).view(2, 2, 2)  # of data, pipeline and tensor parallelism
    pairs, fours = axes.reshape(-1, 2).tolist(), axes.reshape(-1, 4).tolist()
    over_data, over_stages = (axes.permute(order).reshape(-1, 2).tolist() for order in ((1, 2, 0), (0, 2, 1)))
    sets = {"pp:0": over_stages, "tp:0": pairs, "dp:0": over_data, "tp:1": fours}
    coms = {name: communicator(each, name) for name, each in sets.items()}
    assert [name for name, com in coms.items() if com.symm is not None] == ["tp:0", "tp:1"]
    operators: Any = torch.ops.symm_vllm
    own, rest = numbers(rank, 3, 64, dtype=torch.bfloat16), numbers(99, 3, 64, dtype=torch.bfloat16)
    weight = numbers(98, 64, dtype=torch.bfloat16)
    for name in ("tp:0", "tp:1"):
        (members,) = (ranks for ranks in sets[name] if rank in ranks)
        all_ = [numbers(each, 3, 64, dtype=torch.bfloat16) for each in members]
        assert same_bits(coms[name].all_reduce(own), sum(each.float() for each in all_).bfloat16())
        assert same_bits(coms[name].all_gather(own, 0), torch.cat(all_))
        fused = operators.all_reduce_add_rms_norm(own, rest, weight, EPS, name)
        assert all(map(same_bits, fused, reference(all_, rest, weight, EPS))), name
    # Replicas of the model make different numbers of calls, and nothing synchronises the stages of a pipeline.
    for _ in range(20 * (1 + rank // 4)):
        coms["tp:0"].all_reduce(own)
    for name in ("pp:0", "dp:0"):
        coms[name].all_reduce(own)
        assert coms[name].served == ["all_reduce"], name
    for _ in range(3):
        for name in ("tp:0", "tp:1"):
            coms[name].all_reduce(own.t())
    found = [line for line in logged if line.startswith("symm does not serve")]
    assert len(found) == 2 and all("not contiguous" in line for line in found), found
    assert "group tp:0" in found[0] and "group tp:1" in found[1]
    coms["tp:0"].destroy()
    assert coms["tp:1"].symm is not None
    coms["tp:1"].all_reduce(own)
    assert coms["tp:1"].served == ["all_reduce"] * 3 and coms["tp:0"].served == ["all_reduce"] * 3 + ["destroy"]


@pytest.mark.ranks(3, backend="gloo", env=ON | {"VLLM_BATCH_INVARIANT": "1"})
def test_in_batch_invariant_mode_a_row_has_the_same_bits_alone_and_among_others(rank: int) -> None:
    from torch_symm.engines.vllm import OURS, register
    from torch_symm.engines.vllm._fusion import SymmFusionPass
    from vllm.platforms import current_platform

    register()
    config = vllm_doubles.config(pass_config=SimpleNamespace(fuse_allreduce_rms=False))
    current_platform.check_and_update_config(config)
    assert current_platform.get_device_communicator_cls() == OURS
    assert isinstance(config.compilation_config.inductor_compile_config[current_platform.pass_key], SymmFusionPass)
    com, operators = communicator([[0, 1, 2]]), torch.ops.symm_vllm
    own, rest = (numbers(each, 1000, 512, dtype=torch.bfloat16) for each in (rank, 9))
    weight, scale = numbers(8, 512, dtype=torch.bfloat16), torch.tensor(0.02)

    def calls(first: int, last: int) -> list[torch.Tensor]:
        given = own[first:last], rest[first:last], weight, EPS
        return [
            com.all_reduce(own[first:last]),
            *operators.all_reduce_add_rms_norm(*given, "tp:0"),
            *operators.all_reduce_add_rms_norm_fp8(*given, scale, "tp:0"),
            *operators.all_reduce_add_rms_norm_dynamic_fp8(*given, "tp:0"),
        ]

    whole = calls(0, 1000)
    for first, last in ((0, 1), (500, 501), (999, 1000), (3, 19), (100, 356)):
        for part, all_ in zip(calls(first, last), whole, strict=True):
            assert same_bits(part.view(torch.uint8), all_[first:last].contiguous().view(torch.uint8)), (first, last)


@pytest.mark.ranks(2, backend="gloo")
def test_calls_that_symm_does_not_serve_are_left_to_vllm_and_logged_once(rank: int) -> None:
    com = communicator([[0, 1]])
    logged = vllm_doubles.lines()
    columns, logical = numbers(rank, 4, 6, dtype=torch.float32).t(), torch.ones(4, dtype=torch.bool)
    total = numbers(0, 4, 6, dtype=torch.float32) + numbers(1, 4, 6, dtype=torch.float32)
    for _ in range(2):
        assert torch.equal(com.all_reduce(columns), total.t())
    assert com.served == ["all_reduce"] * 2 and len(logged) == 1 and "not contiguous" in logged.pop()
    com.served.clear()
    com.reduce_scatter(logical)
    com.reduce_scatterv(logical, 0, [1, 3])
    com.reduce_scatter(torch.ones(3))
    com.all_gather(torch.empty(4, device="meta"))
    com.all_gatherv([columns, torch.empty(4, device="meta")])
    com.all_gatherv(columns, 1)
    assert com.served[:3] == ["reduce_scatter", "reduce_scatterv", "reduce_scatter"]
    assert com.served[3:] == ["all_gather", "all_gatherv", "all_gatherv"]
    assert len(logged) == 4 and "torch.bool" in logged[0] and "on meta" in logged[2], logged


@pytest.mark.ranks(4, backend="gloo")
def test_later_groups_do_not_depend_on_which_groups_symm_serves(rank: int) -> None:
    from torch_symm.engines import _common

    logged, usual = vllm_doubles.lines(), _common.native_problem
    made = [vllm_doubles.groups([[0, 1], [2, 3]]) for _ in range(3)]
    if rank == 1:
        _common.native_problem = lambda: "no driver"
    assert (communicator([], made=made[0]).symm is None) == (rank < 2)
    if rank == 0:
        assert len(logged) == 1 and "no driver" in logged.pop()
    for group in vllm_doubles.groups([[0, 2], [1, 3]]):
        dist.all_reduce(total := torch.tensor([float(rank)]), group=group)
        assert total.item() == 2 + 2 * (rank % 2)
    _common.native_problem = usual
    if rank % 2:
        dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    names = set()
    for groups in made[1:]:
        com = communicator([], made=groups)
        names.add(com.symm.group_name)
        assert com.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        com.destroy()
    assert len(names) == 2


@pytest.mark.ranks(3, backend="gloo")
def test_a_rank_without_the_plug_in_is_named_and_its_calls_stay_with_the_engine(rank: int) -> None:
    from torch_symm.engines import _common

    logged, (device_group, cpu_group) = vllm_doubles.lines(), vllm_doubles.groups([[0, 1, 2]])
    _common.WAIT_S = 3.0
    com = None if rank == 1 else communicator([], made=(device_group, cpu_group))
    found: list[Any] = [None] * 3
    dist.all_gather_object(found, rank, group=cpu_group)
    assert found == [0, 1, 2]
    # A rank that takes part later gets the outcome of the others at once.
    com = com or communicator([], made=(device_group, cpu_group))
    assert com.symm is None and len(logged) == 1
    assert "rank 1" in logged[0] and "did not take part within 3 s" in logged[0] and "set SYMM_VLLM" in logged[0]
    # The outcome does not affect a later group of the same name.
    _common.WAIT_S = 60.0
    com = communicator([], made=(device_group, cpu_group))
    assert com.all_reduce(torch.ones(3)).tolist() == [3.0] * 3 and com.symm is not None
    store = dist.distributed_c10d._get_process_group_store(cpu_group)
    dist.barrier(cpu_group)
    assert not store.check(["symm/engine/2/start"]) and store.check(["symm/engine/1/take part"])
    com.destroy()


#: Imports the plug-ins in a process that cannot load the native part.
WITHOUT_NATIVE_PART = """
from torch_symm import _native
def load():
    raise ImportError("no native part")
_native.load = load
from torch_symm.engines import _common, sglang, vllm, vllm_cpu
from torch_symm.engines.vllm import _communicator
assert _common.native_problem() == "no native part"
"""


def test_the_plug_ins_can_be_imported_without_the_native_part(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_NATIVE_PART]
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks(2, backend="gloo", env=ON)
@pytest.mark.parametrize("error", [ImportError("torch_symm serves torch 2.11"), OSError("libcuda.so.1: cannot open")])
def test_a_rank_that_cannot_load_the_native_part_tells_the_others(rank: int, error: Exception) -> None:
    from torch_symm.engines import _common
    from torch_symm.engines.vllm import OURS, register
    from vllm.platforms import current_platform

    def load() -> None:
        raise error

    if rank == 1:
        _common.load = load
    register()
    assert current_platform.get_device_communicator_cls() == OURS
    config = vllm_doubles.config()
    current_platform.check_and_update_config(config)
    assert config.compilation_config.pass_config.fuse_allreduce_rms is (rank == 1)
    logged, com = vllm_doubles.lines(), communicator([[0, 1]])
    (line,) = logged
    assert com.symm is None and line.endswith(f"vLLM uses its own collectives: rank 1: {error}")


@pytest.mark.ranks(2, backend="gloo")
def test_a_group_that_cannot_start_is_left_to_vllm_on_all_ranks(rank: int) -> None:
    import vllm.config
    from torch_symm.engines.vllm import _group, _operators

    logged, try_out = vllm_doubles.lines(), _group.try_out
    several = [vllm_doubles.groups([[0, 1]]) for _ in range(2)]

    def failing(call: Any) -> Any:
        def called(*given: Any) -> None:
            if rank == 1:
                raise RuntimeError("no memory")
            call(*given)

        return called

    _group.try_out = failing(try_out)
    com = communicator([], made=several[0])
    assert com.symm is None and _operators.GROUPS == {}
    # Rank 0 waited for rank 1 in the group, and both log why rank 1 left it.
    assert len(logged) == 1 and logged[0].endswith("rank 1: RuntimeError: no memory"), logged
    assert torch.equal(com.all_reduce(torch.ones(3)), torch.full((3,), 2.0)) and com.served == ["all_reduce"]
    _group.try_out = try_out
    com = communicator([], made=several[1])
    assert com.symm is not None and com._warming is None  # Its model is not known to be dense
    com.destroy()
    _group.warm = failing(_group.warm)
    vllm.config.current = vllm_doubles.config()
    com = communicator([], made=several[1])
    assert com.symm is not None and com._warming is not None
    with pytest.raises(RuntimeError, match="unset SYMM_VLLM: no memory" if rank else "unset SYMM_VLLM: .*rank 1"):
        com.all_reduce(torch.ones(3))
    com.destroy()
    assert com.symm is None and com.served == ["destroy"] and _operators.GROUPS == _operators.WARMING == {}
    assert "symm: leaves group tp:0 after a failure: symm cannot serve vLLM" in logged[-1]


@pytest.mark.ranks(1, backend=None)
def test_vllm_is_changed_only_if_the_setting_says_so() -> None:
    from torch_symm.engines.vllm import OURS, USUAL, register
    from torch_symm.engines.vllm._fusion import SymmFusionPass
    from vllm.platforms import current_platform

    key = current_platform.pass_key
    for off in ("", "0", "yes"):
        os.environ["SYMM_VLLM"] = off
        register()
        assert current_platform.get_device_communicator_cls() == USUAL
    os.environ["SYMM_VLLM"] = "1"
    for _ in range(2):
        register()
    assert current_platform.get_device_communicator_cls() == OURS
    config = vllm_doubles.config()
    for _ in range(2):
        current_platform.check_and_update_config(config)
    compilation = config.compilation_config
    found = compilation.inductor_compile_config[key]
    assert isinstance(found, SymmFusionPass) and found.first is None
    assert config.updated == 2 and not compilation.pass_config.fuse_allreduce_rms
    import vllm.config
    from torch_symm.engines.vllm._communicator import _model

    assert _model() == (torch.bfloat16, 0)
    for known, hidden in ((config, 64), (vllm_doubles.config(), 0)):
        vllm.config.current = known
        assert _model() == (torch.float16, hidden)
    copy = pickle.loads(pickle.dumps(found))
    assert copy.uuid() == found.uuid() and len(found.uuid()) == 64 and found.is_applicable_for_range(None)
    for left in (vllm_doubles.config(mode=0), vllm_doubles.config(ranks=1)):
        current_platform.check_and_update_config(left)
        assert left.compilation_config.inductor_compile_config == {}
        assert left.compilation_config.pass_config.fuse_allreduce_rms
    ran: list[Any] = []
    theirs: Any = type("Theirs", (SymmFusionPass.__mro__[1],), {"__call__": lambda self, graph: ran.append(graph)})()
    chained = vllm_doubles.config(inductor_compile_config={key: theirs})
    current_platform.check_and_update_config(chained)
    both = chained.compilation_config.inductor_compile_config[key]
    graph = torch.fx.Graph()
    both(graph)
    assert ran == [graph] and both.uuid() != found.uuid()


@pytest.mark.ranks(1, backend=None, env={"SYMM_VLLM": "unfused"})
def test_without_fusion_vllm_keeps_its_passes() -> None:
    from torch_symm.engines.vllm import OURS, register
    from vllm.platforms import current_platform

    register()
    config = vllm_doubles.config()
    current_platform.check_and_update_config(config)
    assert current_platform.get_device_communicator_cls() == OURS
    assert config.compilation_config.inductor_compile_config == {} and config.updated == 1


#: The plug-in's message, and its cause: a file of vLLM, a text in this file, and the text of another version in its
#: place.
LEFT_ALONE = [
    ("CudaPlatform.check_and_update_config", "platforms", "config(cls, vllm_config)", "config(cls, vllm_config, more)"),
    ("no method get_device_communicator_cls", "platforms", "def get_device_communicator_cls", "def communicator"),
    ("has the parameters (tensor), not (input_)", "cuda_communicator", "reduce(self, input_)", "reduce(self, tensor)"),
    ("CudaCommunicator.__init__", "cuda_communicator", "device_group=None, unique_name", "unique_name"),
    ("another plug-in has chosen the communicator others.", "platforms", '"vllm.distributed', '"others.distributed'),
]


@pytest.mark.parametrize("row", LEFT_ALONE, ids=lambda row: row[0])
@pytest.mark.ranks(1, backend=None, env=ON)
def test_vllm_is_left_alone_with_one_warning(row: tuple[str, ...], tmp_path: Path) -> None:
    said, name, *change = row
    original = next(text for file, text in vllm_doubles.FILES.items() if file.endswith(name))
    assert change[0] in original
    vllm_doubles.write(tmp_path, **{name: original.replace(*change)})
    from torch_symm.engines.vllm import OURS, register
    from vllm.platforms import current_platform

    logged = vllm_doubles.lines()
    register()
    for _ in range(2):
        assert getattr(current_platform, "get_device_communicator_cls", lambda: "")() != OURS
    (line,) = logged
    assert line.startswith("symm is off, and vLLM uses its own collectives: ") and said in line
