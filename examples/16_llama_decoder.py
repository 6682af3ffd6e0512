"""Decodes with a small Llama whose weights are sharded over the ranks, with separate and with fused norms.

    torchrun --nproc-per-node 2 examples/16_llama_decoder.py
    torchrun --nproc-per-node 2 examples/16_llama_decoder.py --device cuda --compile --hidden 4096 --layers 32

Each layer ends its attention and its MLP with an all-reduce, followed by the addition of the residual and
RMSNorm. One operator does all three; the tokens are the same. With --compile Inductor compiles both variants, and
inserts the operator itself. On GPUs both run in CUDA graphs. Another backend (--backend nccl) decodes with separate
steps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_symm
import torch_symm.compile

HEADS, VOCABULARY, EPS = 8, 256, 1e-5

#: (this rank's part of a product, residual, weight) -> (normed, new residual).
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Layer(NamedTuple):
    """Weights of one layer: this rank's heads and its share of the MLP; norms are not sharded."""

    attention: torch.Tensor
    out: torch.Tensor
    into_mlp: torch.Tensor
    down: torch.Tensor
    after_attention: torch.Tensor
    after_mlp: torch.Tensor


class Decoder:
    """One rank's part of the model, and its cache of keys and values."""

    def __init__(self, given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
        rank, world, hidden = dist.get_rank(), dist.get_world_size(), given.hidden
        generator = torch.Generator(device).manual_seed(0)
        options: Any = {"device": device, "dtype": dtype}

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5

        def own(whole: torch.Tensor, dim: int) -> torch.Tensor:
            return whole.chunk(world, dim)[rank].to(**options).contiguous()

        ones = torch.ones(hidden, **options)
        self.heads, self.width = HEADS // world, hidden // HEADS
        self.embedding = torch.randn(VOCABULARY, hidden, generator=generator, device=device).to(**options)
        self.layers = [
            Layer(
                torch.cat([own(weight(hidden, hidden), 0) for _ in range(3)]),
                own(weight(hidden, hidden), 1),
                torch.cat([own(weight(2 * hidden, hidden), 0) for _ in range(2)]),
                own(weight(hidden, 2 * hidden), 1),
                ones * 0.9,
                ones * 1.1,
            )
            for _ in range(given.layers)
        ]
        self.first = ones
        self.cache = torch.zeros(given.layers, 2, given.batch, self.heads, given.tokens, self.width, **options)
        self.places = torch.arange(given.tokens, device=device)

    def reset(self) -> None:
        """Forgets all tokens."""
        self.cache.zero_()

    def step(self, tokens: torch.Tensor, place: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The token that follows each of ``tokens``, which are at ``place``."""
        residual = self.embedding[tokens]
        normed = F.rms_norm(residual, self.first.shape, self.first, EPS)
        seen = (self.places <= place)[None, None, None]
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            query, key, value = F.linear(normed, layer.attention).view(-1, 3, self.heads, 1, self.width).unbind(1)
            keys.index_copy_(2, place, key)
            values.index_copy_(2, place, value)
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
            part = F.linear(attended.reshape(len(tokens), -1), layer.out)
            normed, residual = norm(part, residual, layer.after_attention)
            opening, up = F.linear(normed, layer.into_mlp).chunk(2, -1)
            normed, residual = norm(F.linear(F.silu(opening) * up, layer.down), residual, layer.after_mlp)
        return F.linear(normed, self.embedding).argmax(-1)


def separate(part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums, adds and normalizes in three steps."""
    dist.all_reduce(part)
    residual = residual + part
    return F.rms_norm(residual, weight.shape, weight, EPS), residual


def fused(part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums, adds and normalizes in one operator."""
    torch.ops.symm.all_reduce_add_rms_norm_(part, residual, weight, EPS, dist.group.WORLD.group_name)
    return part, residual


def decode(model: Decoder, norm: Norm, given: argparse.Namespace) -> tuple[torch.Tensor, float]:
    """The tokens that follow 0, 1, 2, ..., and the tokens per second."""
    device = model.embedding.device
    tokens, place = torch.arange(given.batch, device=device), torch.zeros(1, dtype=torch.long, device=device)
    step = torch.compile(model.step) if given.compile else model.step
    model.reset()
    result = step(tokens, place, norm)
    run = lambda: result.copy_(step(tokens, place, norm))  # noqa: E731 - what is captured
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
        torch.cuda.synchronize()
    model.reset()
    found = []
    dist.barrier()
    start = time.perf_counter()
    for at in range(given.tokens):
        place.fill_(at)
        run()
        tokens.copy_(result)
        found.append(result.clone())
    answer = torch.stack(found, 1).cpu()
    return answer, given.batch * given.tokens / (time.perf_counter() - start)


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="symm")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    device = torch.device(given.device, int(os.environ["LOCAL_RANK"]) if given.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(given.backend)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.inference_mode():
        model = Decoder(given, device, dtype)
        tokens, before = decode(model, separate, given)
        told = f"{before:.0f} tokens/s with separate steps"
        if given.backend == "symm":
            if given.compile:
                torch.compiler.reset()
                torch_symm.compile.enable()
            same, after = decode(model, separate if given.compile else fused, given)
            assert torch.equal(tokens, same), "the tokens differ"
            told += f", {after:.0f} with fused ones"
    if dist.get_rank() == 0:
        print(told, flush=True)
        print(f"ok: {tokens.numel()} tokens" + " are the same" * (given.backend == "symm"), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
