"""torch.ops.symm.all_reduce_add_rms_norm on several hosts: the bits of an all-reduce there, then those of the norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from machines import run_hosts
from norm_reference import numbers, rms_norm, same_bits, to_dynamic_fp8, to_fp8

EPS = 1e-6
ops: Any = torch.ops.symm


def forms(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    scale = torch.tensor(0.03)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((1, 8), (2, 64), (3, 4104), (40, 2048)):
            own = numbers(rank, *shape, dtype=dtype)
            residual, weight = numbers(100, *shape, dtype=dtype), numbers(101, shape[-1], dtype=dtype)
            summed = own.clone()
            dist.all_reduce(summed)
            added = summed + residual
            wanted = rms_norm(added, weight, EPS)
            normed, total = ops.all_reduce_add_rms_norm(own, residual, weight, EPS, name)
            assert same_bits(normed, wanted) and same_bits(total, added), (dtype, shape)
            quantized, total = ops.all_reduce_add_rms_norm_fp8(own, residual, weight, EPS, scale, name)
            assert same_bits(quantized, to_fp8(wanted, scale)) and same_bits(total, added), (dtype, shape)
            quantized, total, scales = ops.all_reduce_add_rms_norm_dynamic_fp8(own, residual, weight, EPS, name)
            codes, wanted_scales = to_dynamic_fp8(wanted)
            assert same_bits(quantized, codes) and same_bits(scales, wanted_scales), (dtype, shape)
            ops.all_reduce_add_rms_norm_(own, residual, weight, EPS, name)
            assert same_bits(own, wanted) and same_bits(residual, added), (dtype, shape)
    # Hosts that disagree on what one all-reduce would not tell apart.
    rows = torch.ones(2, 64)
    with pytest.raises(torch_symm.SymmMismatch, match=r"all_reduce_add_rms_norm\(2 × 64 × float32, eps 1e-6\)"):
        ops.all_reduce_add_rms_norm(rows, rows, torch.ones(64), EPS if rank < 2 else 1e-5, name)


def test_bits_are_those_of_separate_steps() -> None:
    run_hosts(forms, [2, 1])
