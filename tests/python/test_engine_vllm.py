"""torch_symm.engines.vllm with duck types of vLLM's classes: communicator, fusion, and what makes vLLM use them."""

from __future__ import annotations

import operator
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import vllm_doubles
from norm_reference import numbers, reference, same_bits, to_dynamic_fp8, to_fp8
from ranks import run_ranks

CPU = torch.device("cpu")
EPS = 1e-5
ON = {"SYMM_VLLM": "1"}


def communicator(sets: list[list[int]], name: str = "tp:0", groups: Any = None) -> Any:
    from torch_symm.engines.vllm._communicator import SymmCommunicator

    device_group, cpu_group = groups or vllm_doubles.groups(sets)
    return SymmCommunicator(cpu_group=cpu_group, device=CPU, device_group=device_group, unique_name=name)


def collectives(rank: int, world: int, folder: Path) -> None:
    vllm_doubles.use(folder)
    logged = vllm_doubles.lines()
    sets = [[0, 1, 2], [3, 4, 5]]
    pipeline = communicator([[0, 3], [1, 4], [2, 5]], "pp:0")
    assert pipeline.symm is None
    com = communicator(sets)
    place, own = com.rank_in_group, numbers(rank, 6, 4, 6, dtype=torch.bfloat16)
    (members,) = (ranks for ranks in sets if rank in ranks)
    all_ = [numbers(each, 6, 4, 6, dtype=torch.bfloat16) for each in members]
    total = (all_[0].float() + all_[1].float() + all_[2].float()).bfloat16()
    kept = own.clone()
    assert same_bits(com.all_reduce(own), total) and same_bits(own, kept)
    for dim in (0, 1, 2, -1, -3):
        gathered = com.all_gather(own, dim)
        assert gathered.is_contiguous() and same_bits(gathered, torch.cat(all_, dim)), dim
    for dim in (0, 2, -1):
        part = com.reduce_scatter(own, dim)
        assert part.is_contiguous() and same_bits(part, total.chunk(3, dim)[place].contiguous()), dim
    assert same_bits(com.reduce_scatterv(own, 0), total.chunk(3)[place])
    assert same_bits(com.reduce_scatterv(own, 0, [1, 0, 5]), total.split([1, 0, 5])[place])
    sizes = [1, 3, 2]
    rows = [each[: sizes[i]] for i, each in enumerate(all_)]
    assert same_bits(com.all_gatherv(rows[place], 0, sizes), torch.cat(rows))
    first, second = com.all_gatherv([own, own[:2]])
    assert same_bits(first, torch.cat(all_)) and same_bits(second, torch.cat([each[:2] for each in all_]))
    for dtype in (torch.float8_e4m3fn, torch.bool):
        narrow = (own > 0).to(dtype)
        assert same_bits(
            com.all_gather(narrow, 0).view(torch.uint8), torch.cat([(e > 0) for e in all_]).to(dtype).view(torch.uint8)
        )
    assert com.served == []
    assert [line.startswith("symm ") and "group tp:0" in line for line in logged] == [True] * (place == 0)
    com.destroy()
    assert com.symm is None and com.served == ["destroy"]
    com.all_reduce(own)
    assert com.served == ["destroy", "all_reduce"]


def test_collectives_of_tensor_parallel_groups_beside_pipeline_parallel_ones(tmp_path: Path) -> None:
    run_ranks(collectives, 6, vllm_doubles.write(tmp_path), backend="gloo")


def rejections(rank: int, world: int, folder: Path) -> None:
    vllm_doubles.use(folder)
    com = communicator([[0, 1]])
    logged = vllm_doubles.lines()
    columns, logical = numbers(rank, 4, 6, dtype=torch.float32).t(), torch.ones(4, dtype=torch.bool)
    for _ in range(2):
        assert torch.equal(
            com.all_reduce(columns),
            numbers(0, 4, 6, dtype=torch.float32).t() + numbers(1, 4, 6, dtype=torch.float32).t(),
        )
    assert com.served == ["all_reduce"] * 2 and len(logged) == 1 and "not contiguous" in logged.pop()
    com.served.clear()
    com.reduce_scatter(logical)
    com.reduce_scatterv(logical, 0, [1, 3])
    com.reduce_scatter(torch.ones(3))
    com.all_gather(torch.empty(4, device="meta"))
    com.all_gatherv([columns, torch.empty(4, device="meta")])
    com.all_gatherv(columns, 1)
    assert com.served == [
        "reduce_scatter",
        "reduce_scatterv",
        "reduce_scatter",
        "all_gather",
        "all_gatherv",
        "all_gatherv",
    ]
    assert len(logged) == 4 and "torch.bool" in logged[0] and "on meta" in logged[2], logged


def test_calls_that_symm_does_not_serve_are_left_to_vllm_and_logged_once(tmp_path: Path) -> None:
    run_ranks(rejections, 2, vllm_doubles.write(tmp_path), backend="gloo")


def failed_starts(rank: int, world: int, folder: Path) -> None:
    vllm_doubles.use(folder)
    import vllm.config  # type: ignore[import-not-found]
    from torch_symm.engines.vllm import _group, _operators

    logged, try_out = vllm_doubles.lines(), _group.try_out
    several = [vllm_doubles.groups([[0, 1]]) for _ in range(3)]
    if rank == 1:
        dist.new_group([1], backend="gloo", use_local_synchronization=True)
    assert communicator([], groups=several[0]).symm is None
    assert len(logged) == 1 and "different numbers of groups" in logged.pop()
    if rank == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)

    def failing(call: Any) -> Any:
        def called(*given: Any) -> None:
            if rank == 1:
                raise RuntimeError("no memory")
            call(*given)

        return called

    _group.try_out = failing(try_out)
    com = communicator([], groups=several[1])
    assert com.symm is None and _operators.GROUPS == {}
    # Rank 0 waited for rank 1, whose group ended.
    assert len(logged) == 1 and "SymmPeerError: " in logged[0] and "rank 1" in logged[0], logged
    assert torch.equal(com.all_reduce(torch.ones(3)), torch.full((3,), 2.0)) and com.served == ["all_reduce"]
    _group.try_out = try_out
    com = communicator([], groups=several[2])
    assert com.symm is not None and com._warming is None  # Its model is not known to be dense
    com.destroy()
    _group.warm = failing(_group.warm)
    vllm.config.current = vllm_doubles.config()
    com = communicator([], groups=several[2])
    assert com.symm is not None and com._warming is not None
    with pytest.raises(RuntimeError, match="unset SYMM_VLLM: no memory" if rank else "unset SYMM_VLLM: .*rank 1"):
        com.all_reduce(torch.ones(3))


def test_a_group_that_cannot_start_is_left_to_vllm_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(failed_starts, 2, vllm_doubles.write(tmp_path), backend="gloo")


def registered(rank: int, world: int, folder: Path) -> None:
    vllm_doubles.use(folder)
    from torch_symm.engines.vllm import OURS, USUAL, register
    from torch_symm.engines.vllm._fusion import SymmFusionPass
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

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
    import vllm.config  # type: ignore[import-not-found]
    from torch_symm.engines.vllm._communicator import _model

    assert _model() == (torch.bfloat16, 0)
    for known, hidden in ((config, 64), (vllm_doubles.config(), 0)):
        vllm.config.current = known
        assert _model() == (torch.float16, hidden)
    copy = pickle.loads(pickle.dumps(found))
    assert copy.uuid() == found.uuid() and len(found.uuid()) == 64 and found.is_applicable_for_range(None)
    for left in (vllm_doubles.config(mode=0), vllm_doubles.config(ranks=1)):
        current_platform.check_and_update_config(left)
        assert (
            left.compilation_config.inductor_compile_config == {}
            and left.compilation_config.pass_config.fuse_allreduce_rms
        )
    ran: list[Any] = []
    theirs: Any = type("Theirs", (SymmFusionPass.__mro__[1],), {"__call__": lambda self, graph: ran.append(graph)})()
    chained = vllm_doubles.config(inductor_compile_config={key: theirs})
    current_platform.check_and_update_config(chained)
    both = chained.compilation_config.inductor_compile_config[key]
    graph = torch.fx.Graph()
    both(graph)
    assert ran == [graph] and both.uuid() != found.uuid()


def test_vllm_is_changed_only_if_the_setting_says_so(tmp_path: Path) -> None:
    run_ranks(registered, 1, vllm_doubles.write(tmp_path), backend=None)


def unfused(rank: int, world: int, folder: Path) -> None:
    vllm_doubles.use(folder)
    from torch_symm.engines.vllm import OURS, register
    from vllm.platforms import current_platform

    register()
    config = vllm_doubles.config()
    current_platform.check_and_update_config(config)
    assert current_platform.get_device_communicator_cls() == OURS
    assert config.compilation_config.inductor_compile_config == {} and config.updated == 1


def test_without_fusion_vllm_keeps_its_passes(tmp_path: Path) -> None:
    run_ranks(unfused, 1, vllm_doubles.write(tmp_path), backend=None, env={"SYMM_VLLM": "unfused"})


#: A file, a text in it that another version of vLLM has changed, and the plug-in's message.
CHANGES = [
    (
        "platforms",
        "config(cls, vllm_config)",
        "config(cls, vllm_config, again)",
        "CudaPlatform.check_and_update_config",
    ),
    ("platforms", "def get_device_communicator_cls", "def communicator", "no method get_device_communicator_cls"),
    (
        "cuda_communicator",
        "all_reduce(self, input_)",
        "all_reduce(self, tensor)",
        "has the parameters (tensor), not (input_)",
    ),
    ("cuda_communicator", "device_group=None, unique_name", "unique_name", "CudaCommunicator.__init__"),
    ("platforms", '"vllm.distributed', '"others.distributed', "another plug-in has chosen the communicator others."),
]


def other_versions(rank: int, world: int, folder: Path, said: str) -> None:
    vllm_doubles.use(folder)
    from torch_symm.engines.vllm import OURS, register
    from vllm.platforms import current_platform

    logged = vllm_doubles.lines()
    register()
    for _ in range(2):
        choose = getattr(current_platform, "get_device_communicator_cls", lambda: "")
        assert choose() != OURS
    assert len(logged) == 1 and logged[0].startswith("symm is off, and vLLM uses its own") and said in logged[0], logged


@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_another_version_of_vllm_is_left_alone_with_one_warning(change: int, tmp_path: Path) -> None:
    name, text, instead, said = CHANGES[change]
    original = next(text for file, text in vllm_doubles.FILES.items() if file.endswith(name))
    assert text in original
    changed = vllm_doubles.write(tmp_path, **{name: original.replace(text, instead)})
    run_ranks(other_versions, 1, changed, said, backend=None, env=ON)


def without_native_part(rank: int, world: int, folder: Path, error: Exception) -> None:
    vllm_doubles.use(folder)
    from torch_symm.engines import _common
    from torch_symm.engines.vllm import USUAL, register
    from vllm.platforms import current_platform

    def load() -> None:
        raise error

    _common.load = load  # type: ignore[assignment]
    logged, key = vllm_doubles.lines(), current_platform.pass_key
    register()
    config = vllm_doubles.config()
    current_platform.check_and_update_config(config)
    assert current_platform.get_device_communicator_cls() == USUAL
    assert key not in config.compilation_config.inductor_compile_config
    assert len(logged) == 1 and logged[0].endswith(f"vLLM uses its own collectives: {error}"), logged


@pytest.mark.parametrize("error", (ImportError("torch_symm serves torch 2.11"), OSError("libcuda.so.1: cannot open")))
def test_without_the_native_part_vllm_is_left_alone_with_one_warning(error: Exception, tmp_path: Path) -> None:
    run_ranks(without_native_part, 1, vllm_doubles.write(tmp_path), error, backend=None, env=ON)


def quantized_by_vllm(op: Any, place: dict[str, int], **given: Any) -> list[torch.Tensor]:
    from torch._higher_order_ops.auto_functionalize import auto_functionalized

    results = auto_functionalized(op, **given)
    return [results[index] for index in place.values()]


def layers(static: bool, dynamic: bool) -> dict[str, Any]:
    """Functions of input, residual, weight and scale, as vLLM writes the code after an all-reduce."""
    ops: Any = torch.ops

    def reduced(x: Any, group: str = "tp:0") -> Any:
        return ops.vllm.all_reduce(x, group_name=group)

    def norm(x: Any, r: Any, w: Any, **more: Any) -> Any:
        return ops.vllm_ir.fused_add_rms_norm(reduced(x), r, w, EPS, **more)

    def empty(x: Any) -> Any:
        return torch.empty_like(x, dtype=torch.float8_e4m3fn)

    def by_torch(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        return (normed.float() * s.reciprocal()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), added

    def by_vllm(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        op = ops._C.static_scaled_fp8_quant.default
        return *quantized_by_vllm(op, {"result": 1}, result=empty(x), input=normed, scale=s, group_shape=None), added

    def with_norm(x: Any, r: Any, w: Any, s: Any) -> Any:
        op = ops._C.fused_add_rms_norm_static_fp8_quant.default
        given = {"result": empty(x), "input": reduced(x), "residual": r, "weight": w, "scale": s, "epsilon": EPS}
        return quantized_by_vllm(op, {"result": 1, "residual": 2}, **given)

    def rows_by_torch(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        largest = normed.abs().max(-1)[0].unsqueeze(-1).to(torch.float32)
        scales = (largest / 448.0).clamp(min=1 / (448 * 512))
        return (normed.float() * scales.reciprocal()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), added, scales

    def rows_by_vllm(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        scales = torch.empty(x.shape[0], 1)
        op = ops._C.dynamic_per_token_scaled_fp8_quant.default
        given = {"result": empty(x), "input": normed, "scale": scales, "scale_ub": None}
        rows, scales = quantized_by_vllm(op, {"result": 1, "scale": 2}, **given)
        return rows, added, scales

    def rows_with_norm(x: Any, r: Any, w: Any, s: Any) -> Any:
        op = ops._C.rms_norm_dynamic_per_token_quant.default
        given = {"result": empty(x), "input": reduced(x), "weight": w, "scale": torch.empty(x.shape[0], 1)}
        place = {"result": 1, "residual": 3, "scale": 2}
        return quantized_by_vllm(op, place, **given, epsilon=EPS, scale_ub=None, residual=r)

    def used_twice(x: Any, r: Any, w: Any, s: Any) -> Any:
        total = reduced(x)
        return *ops.vllm_ir.fused_add_rms_norm(total, r, w, EPS), total

    if static:
        return {each.__name__: each for each in (by_torch, by_vllm, with_norm)}
    if dynamic:
        return {each.__name__: each for each in (rows_by_torch, rows_by_vllm, rows_with_norm)}
    return {
        "both": lambda x, r, w, s: norm(x, r, w),
        "normed": lambda x, r, w, s: (norm(x, r, w)[0],),
        "added": lambda x, r, w, s: (norm(x, r, w)[1],),
        "used twice": used_twice,
        "part of the row": lambda x, r, w, s: norm(x, r, w, variance_size=8),
        "another group": lambda x, r, w, s: ops.vllm_ir.fused_add_rms_norm(reduced(x, "ep:0"), r, w, EPS),
        "wide weight": lambda x, r, w, s: norm(x, r, w.double()),
        "odd rows": lambda x, r, w, s: norm(x[:, :12].contiguous(), r[:, :12].contiguous(), w[:12].contiguous()),
    }


def fused(rank: int, world: int, folder: Path) -> None:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    vllm_doubles.use(folder)
    vllm_doubles.operators()
    com = communicator([[0, 1]])
    from torch_symm.engines.vllm._fusion import SymmFusionPass

    operators, table = torch.ops.symm_vllm, select_decomp_table()
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [numbers(each, 4, 64, dtype=dtype) for each in range(world)]
        residual, weight = numbers(10, 4, 64, dtype=dtype), numbers(11, 64, dtype=dtype)
        given = inputs[rank], residual, weight, torch.tensor(0.02)
        normed, added = reference(inputs, residual, weight, EPS)
        rows, scales = to_dynamic_fp8(normed)
        kinds = [
            ("all_reduce_add_rms_norm", layers(False, False), [normed, added]),
            ("all_reduce_add_rms_norm_fp8", layers(True, False), [to_fp8(normed, given[3]), added]),
            ("all_reduce_add_rms_norm_dynamic_fp8", layers(False, True), [rows, added, scales]),
        ]
        for name, written, wanted in kinds:
            few = None if dtype == torch.bfloat16 else 1
            for layer, function in list(written.items())[:few]:
                graph = make_fx(function, decomposition_table=table, tracing_mode="fake")(*given)
                before = graph(*given)
                graph.graph.eliminate_dead_code()
                SymmFusionPass()(graph.graph)
                graph.graph.lint()
                graph.recompile()
                found = graph.graph.find_nodes(op="call_function", target=getattr(operators, name).default)
                left = graph.graph.find_nodes(op="call_function", target=torch.ops.vllm.all_reduce.default)
                is_fused = layer in ("both", "normed", "added") or name.endswith("fp8")
                assert (len(found), len(left)) == (is_fused, not is_fused), (layer, graph.code)
                for node in graph.graph.find_nodes(op="call_function", target=operator.getitem) if is_fused else []:
                    index = node.args[1]
                    if node.args[0] in found and isinstance(index, int):
                        assert (
                            node.meta["val"].dtype == wanted[index].dtype
                            and node.meta["val"].shape == wanted[index].shape
                        )
                kept = given[1].clone()
                after = graph(*given)
                assert torch.equal(given[1], kept)
                if is_fused:
                    exact = {"normed": wanted[:1], "added": wanted[1:2]}.get(layer, wanted)
                    assert all(map(same_bits, after, exact)), layer
                for one, other in zip(after, before, strict=True):
                    assert torch.allclose(
                        one.float(), other.float(), rtol=0.13 if one.dtype.itemsize == 1 else 0.02, atol=1e-5
                    ), layer
    assert com.served == []


def test_graphs_of_vllm_become_fused_operators(tmp_path: Path) -> None:
    run_ranks(fused, 2, vllm_doubles.write(tmp_path), backend="gloo")


def without_symm(rank: int, world: int) -> None:
    vllm_doubles.operators()
    from torch_symm.engines.vllm import _operators

    assert _operators.GROUPS == {}
    operators: Any = torch.ops.symm_vllm
    dtype = torch.bfloat16
    inputs = [numbers(each, 4, 64, dtype=dtype) for each in range(world)]
    residual, weight, scale = numbers(10, 4, 64, dtype=dtype), numbers(11, 64, dtype=dtype), torch.tensor(0.02)
    wanted, added = reference(inputs, residual, weight, EPS)
    given = inputs[rank], residual, weight, EPS
    normed, sum_ = operators.all_reduce_add_rms_norm(*given, "tp:0")
    assert torch.equal(sum_, added) and torch.allclose(normed, wanted, rtol=0.02)
    rows, _ = operators.all_reduce_add_rms_norm_fp8(*given, scale, "tp:0")
    assert torch.allclose(rows.float(), to_fp8(wanted, scale).float(), rtol=0.13)
    rows, _, scales = operators.all_reduce_add_rms_norm_dynamic_fp8(*given, "tp:0")
    rows_, scales_ = to_dynamic_fp8(wanted)
    assert torch.allclose(rows.float(), rows_.float(), rtol=0.13) and torch.allclose(scales, scales_, rtol=0.02)


def test_a_cached_graph_still_runs_if_symm_does_not_serve_the_group() -> None:
    run_ranks(without_symm, 2, backend="gloo")
