"""torch.ops.symm.all_reduce_add_rms_norm on several nodes has the bits of the group's all-reduce and a norm."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch_symm
from launch import on_nodes, run_nodes
from norm_reference import EPS, Rows, every_form, ops, rms_norm


class NodeRows(Rows):
    """Rows that are reduced by the group's own all_reduce."""

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        dist.all_reduce(summed := self.own.clone())
        return rms_norm(summed + self.residual, self.weight, EPS), summed + self.residual


@on_nodes(2, 1)
def test_bits_are_those_of_separate_steps(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((1, 8), (2, 64), (3, 4104), (40, 2048)):
            every_form(NodeRows(rank, world_size, shape, dtype), name)
    # The nodes disagree on eps, which does not affect the all-reduce.
    rows = torch.ones(2, 64)
    with pytest.raises(torch_symm.SymmMismatchError, match=r"all_reduce_add_rms_norm\(2 × 64 × float32, eps 1e-6\)"):
        ops.all_reduce_add_rms_norm(rows, rows, torch.ones(64), 1e-6 if rank < 2 else 1e-5, name)


def served(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether graphs of CPU and of CUDA tensors get the operator, in a group that uses symm for both."""
    from torch._subclasses import FakeTensorMode
    from torch_symm.compile import _nodes, _norms

    _norms.is_of_symm = lambda group, tensor: True
    name = dist.group.WORLD.group_name
    assert _nodes.groups() == ((name, True, False, world_size > 1),), "the key of cached graphs"
    with FakeTensorMode():
        cpu, cuda = (_norms._is_served(torch.empty(4, 64, device=device), name) for device in ("cpu", "cuda"))
    return cpu, cuda


def test_compiled_code_uses_the_operator_only_where_it_runs() -> None:
    assert set(run_nodes(served, (1, 1))) == {(True, False)}
    assert set(run_nodes(served, (1,))) == {(True, True)}
