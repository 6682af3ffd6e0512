"""``python benches/serving_vllm.py``: tokens per second of a random Llama in vLLM, with symm and without.

All engines of a series are resident on the GPUs at once and take turns, so that they see the same machine. A series is
vLLM as it is installed or, with ``--invariant``, in its batch-invariant mode. Each engine generates for one request and
for several, greedily; prefill is subtracted. vLLM must be installed; nothing is downloaded: the configuration is
written here, and the weights are random, the same in every engine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: The environment of each mode, and arguments of the engine. In ``own-norm`` vLLM's CUDA kernel adds and norms, which
#: rounds the sum before the norm, as the fused operator does; vLLM's compiled code norms the sum before it is rounded.
MODES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "nccl": ({}, {"disable_custom_all_reduce": True}),
    "default": ({}, {}),
    "own-norm": ({}, {"kernel_config": {"ir_op_priority": {"fused_add_rms_norm": ["vllm_c"]}}}),
    "symm": ({"SYMM_VLLM": "1"}, {}),
    "symm-unfused": ({"SYMM_VLLM": "unfused"}, {}),
}
#: Modes that differ from the default only if vLLM is not batch-invariant.
VARIANT = ("nccl", "own-norm")
#: Settings that make vLLM quiet and keep it from using the network and NVLink multicast.
QUIET = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"),
    **dict.fromkeys(("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_USE_FLASHINFER_SAMPLER", "NCCL_NVLS_ENABLE"), "0"),
    **{"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_HOST_IP": "127.0.0.1"},
    **{"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TOKENIZERS_PARALLELISM": "false"},
}
PROMPT, VOCABULARY = 32, 32000


class Extension:
    """Methods of vLLM's workers, called by ``LLM.collective_rpc``."""

    model_runner: Any
    _graphs: Any

    def randomise(self) -> None:
        """Draws weights of a usual size: with vLLM's dummy weights, sums over the ranks would not change the tokens."""
        import torch

        rank = torch.distributed.get_rank()
        for index, (name, weight) in enumerate(sorted(self.model_runner.get_model().named_parameters())):
            if weight.dim() == 1:
                weight.data.fill_(1.0 if "norm" in name else 0.0)
            else:
                generator = torch.Generator(device=weight.device).manual_seed(1000 * index + rank)
                drawn = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                weight.data.copy_(drawn.normal_(0, 0.02, generator=generator))
        torch.cuda.synchronize()

    def time_graphs(self, on: bool) -> float | None:
        """Begins to time the replays of CUDA graphs; or ends that, and returns the median time on the GPU in µs."""
        import torch

        graphs: Any = torch.cuda.CUDAGraph
        if on:
            usual, times = graphs.replay, []

            def replay(graph: Any) -> None:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                usual(graph)
                end.record()
                times.append((begin, end))

            self._graphs = usual, times
            graphs.replay = replay
            return None
        graphs.replay, times = self._graphs
        torch.cuda.synchronize()
        found = [begin.elapsed_time(end) * 1e3 for begin, end in times]
        return round(statistics.median(found), 1) if found else None

    def measure(self, sizes: list[int]) -> dict[str, Any]:
        """Returns the class that serves the tensor-parallel group, its start in s, and µs of all-reduces."""
        import torch
        from vllm.distributed.parallel_state import get_tp_group, graph_capture

        group = get_tp_group()
        own = group.device_communicator
        found: dict[str, Any] = {"class": type(own).__name__, "start_s": round(getattr(own, "symm_start_s", 0.0), 3)}
        found["wait_s"] = round(getattr(own, "symm_wait_s", 0.0), 3)
        with torch.inference_mode():
            for size in sizes:
                tensor, calls, times = torch.zeros(size // 8192, 4096, device="cuda", dtype=torch.bfloat16), 100, []
                for _ in range(3):
                    group.all_reduce(tensor)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with graph_capture(device=tensor.device) as context, torch.cuda.graph(graph, stream=context.stream):
                    result = tensor
                    for _ in range(calls):
                        result = group.all_reduce(result)
                for _ in range(9):
                    torch.distributed.barrier(group.cpu_group)
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                    times.append(begin.elapsed_time(end) * 1e3 / calls)
                found[f"graph_us_{size >> 10}K"] = round(statistics.median(times), 2)
            tensor, times = torch.zeros(8, 4096, device="cuda", dtype=torch.bfloat16), []
            for _ in range(9):
                torch.cuda.synchronize()
                torch.distributed.barrier(group.cpu_group)
                begun = time.perf_counter()
                for _ in range(50):
                    group.all_reduce(tensor)
                times.append((time.perf_counter() - begun) / 50 * 1e6)
            found["host_us_64K"] = round(statistics.median(times), 2)
        if "torch_symm" in sys.modules:
            found["calls"] = str(sys.modules["torch_symm"].stats())
        return found


def write_model(folder: Path, layers: int) -> None:
    """Writes the configuration of a Llama, which has 7 billion parameters with 32 layers."""
    model = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"},
        **{"hidden_size": 4096, "num_hidden_layers": layers, "intermediate_size": 14336, "head_dim": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 1e4},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "bos_token_id": 1, "eos_token_id": 2},
    }
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


def serve(mode: str, given: argparse.Namespace) -> None:
    """An engine: reads a command from each line of its input, and answers with a line to the pipe ``given.answers``."""
    from vllm import LLM, SamplingParams

    answers = os.fdopen(given.answers, "w", buffering=1)
    more: dict[str, Any] = {"enforce_eager": True} if given.eager else {}
    if not given.eager:
        more["compilation_config"] = {"cudagraph_capture_sizes": sorted({1, 2, 4, 8, *given.batches, given.among})}
    if given.attention:
        more["attention_backend"] = given.attention
    begun = time.perf_counter()
    llm = LLM(
        model=given.model,
        **{"tensor_parallel_size": given.ranks, "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0},
        **{"dtype": "bfloat16", "max_model_len": 1024, "max_num_batched_tokens": 1024, "enable_prefix_caching": False},
        **{"max_num_seqs": max(*given.batches, given.among), "gpu_memory_utilization": 0.15, "disable_log_stats": True},
        **{"kv_cache_memory_bytes": 1 << 30, "distributed_executor_backend": "mp"},
        worker_extension_cls="serving_vllm.Extension",
        **{**more, **MODES[mode][1]},
    )
    llm.collective_rpc("randomise")
    answers.write(json.dumps({"init_s": round(time.perf_counter() - begun, 1)}) + "\n")

    def generate(requests: list[int], tokens: int) -> tuple[float, list[list[int]]]:
        prompts = [
            {"prompt_token_ids": [(7919 * (each + 1) + 104729 * i) % (VOCABULARY - 3) + 3 for i in range(PROMPT)]}
            for each in requests
        ]
        chosen = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        outputs = llm.generate(prompts, chosen, use_tqdm=False)
        return time.perf_counter() - begun, [list(each.outputs[0].token_ids) for each in outputs]

    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "measure":
            answer = llm.collective_rpc("measure", args=(command["sizes"],))[0]
            # The step of one request by itself, without the engine's time between steps.
            llm.collective_rpc("time_graphs", args=(True,))
            generate([0], given.tokens)
            answer["step_us"] = llm.collective_rpc("time_graphs", args=(False,))[0]
        else:
            prefill = generate(command["requests"], 1)[0]
            seconds, tokens = generate(command["requests"], given.tokens + 1)
            speed = len(tokens) * given.tokens / (seconds - prefill)
            answer = {"tokens_per_s": round(speed, 1), "tokens": tokens}
        answers.write(json.dumps(answer) + "\n")


class Engine:
    """An engine in another process."""

    def __init__(self, mode: str, invariant: bool, given: argparse.Namespace) -> None:
        self.mode, self.speeds, self.tokens = mode, {each: [] for each in given.batches}, {}
        self.name = mode + " invariant" * invariant
        reading, writing = os.pipe()
        here = str(Path(__file__).parent)
        environment = {**os.environ, **QUIET, **MODES[mode][0], "VLLM_BATCH_INVARIANT": str(int(invariant))}
        environment["PYTHONPATH"] = f"{here}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        environment["VLLM_CACHE_ROOT"] = str(Path(given.model, "cache", self.name.replace(" ", "-")))
        command = [sys.executable, __file__, *sys.argv[1:], "--serve", mode, "--model", given.model]
        with Path(given.logs, self.name.replace(" ", "-") + ".log").open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--answers", str(writing)],
                **{"env": environment, "pass_fds": [writing], "text": True},
                **{"stdin": subprocess.PIPE, "stdout": log, "stderr": log},
            )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def answer(self) -> dict[str, Any]:
        """Returns the next answer; an empty one if the engine has ended."""
        return json.loads(self._answers.readline() or "{}")

    def ask(self, **command: Any) -> dict[str, Any]:
        """Sends a command, and waits for the answer."""
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {}
        return self.answer()

    def end(self) -> None:
        """Waits for the engine's process, whose input is closed; its workers end with it."""
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def series(invariant: bool, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of each mode, from engines that take turns."""
    engines = every = [Engine(mode, invariant, given) for mode in given.modes if mode not in VARIANT or not invariant]
    rows: list[dict[str, Any]] = []
    try:
        started = {engine.name: engine.answer() for engine in engines}
        engines = [engine for engine in engines if started[engine.name]]
        for name in started.keys() - {engine.name for engine in engines}:
            print(f"{name}: the engine did not start: see its log in {given.logs}", flush=True)
        for turn in range(given.rounds + 1):  # The first turn is not counted
            for engine in engines if turn % 2 else reversed(engines):
                for batch in given.batches:
                    found = engine.ask(do="generate", requests=list(range(batch)))
                    if turn and found:
                        engine.speeds[batch].append(found["tokens_per_s"])
                    engine.tokens[batch] = found.get("tokens", [[]])
        for engine in engines:
            among = engine.ask(do="generate", requests=[*range(1, given.among), 0]).get("tokens", [[]])
            row = {"mode": engine.name, **started[engine.name], "same_among_others": among[-1] == engine.tokens[1][0]}
            for batch, speeds in engine.speeds.items():
                row[f"tokens_per_s_{batch}"] = round(statistics.median(speeds), 1) if speeds else None
                row[f"all_{batch}"] = speeds
            row["tokens_1"] = hashlib.sha256(json.dumps(engine.tokens[1]).encode()).hexdigest()[:12]
            rows.append({**row, **engine.ask(do="measure", sizes=[8 << 10, 128 << 10, 1 << 20])})
            print(json.dumps(rows[-1]), flush=True)
    finally:
        for engine in every:
            engine.process.stdin.close()
        for engine in every:
            engine.end()
    return rows


def main() -> None:
    """Runs the engines and prints a table."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=list(MODES),
        help="comma-separated, of: " + ",".join(MODES),
    )
    made.add_argument("--invariant", action="store_true", help="add a series in vLLM's batch-invariant mode")
    made.add_argument("--only-invariant", action="store_true", help="measure only the batch-invariant series")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--layers", type=int, default=32)
    made.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=[1, 16])
    made.add_argument("--among", type=int, default=17, help="size of the batch in which the first request is repeated")
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--eager", action="store_true")
    made.add_argument("--attention", help="vLLM's attention backend, such as TRITON_ATTN")
    made.add_argument("--json", help="file for all figures")
    made.add_argument("--logs", default=tempfile.gettempdir(), help="directory for the engines' logs")
    made.add_argument("--serve", choices=MODES, help=argparse.SUPPRESS)
    made.add_argument("--model", help=argparse.SUPPRESS)
    made.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.serve:
        serve(given.serve, given)
        return
    with tempfile.TemporaryDirectory() as folder:
        given.model = folder
        write_model(Path(folder), given.layers)
        rows = [] if given.only_invariant else series(False, given)
        rows += series(True, given) if given.invariant or given.only_invariant else []
    print("| mode | " + " | ".join(f"batch {batch}, tokens/s" for batch in given.batches) + " | same among others |")
    print("|---" * (len(given.batches) + 2) + "|")
    for row in rows:
        speeds = " | ".join(str(row[f"tokens_per_s_{batch}"]) for batch in given.batches)
        print(f"| {row['mode']} | {speeds} | {row['same_among_others']} |")
    for kind in ("", " invariant"):
        alike = {row["tokens_1"] for row in rows if row["mode"].endswith("invariant") == bool(kind)}
        if alike:
            print(f"tokens of one request{kind}: {'equal in all modes' if len(alike) == 1 else sorted(alike)}")
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
