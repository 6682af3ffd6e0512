"""Ray Train with the backend's name; its workers train with DDP and write their results to a directory."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# The cluster is only this node, so authentication is off. Workers may start slowly, because each imports torch.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}

import ray
import torch
from common import batches, model_and_optimizer, tell
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

RANKS = 2


def train(settings: dict[str, Any]) -> None:
    model, _ = model_and_optimizer()
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = get_context().get_world_rank()
    losses = []
    for inputs, targets in batches(rank):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with (Path(settings["folder"]) / str(rank)).open("w") as file, contextlib.redirect_stdout(file):
        tell(model, losses)


quiet = {"env_vars": {"OMP_NUM_THREADS": "1"}}
ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20, runtime_env=quiet)
with tempfile.TemporaryDirectory() as folder:
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend=sys.argv[1]),
        scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder, name="run"),
    )
    trainer.fit()
    for rank in range(RANKS):
        print((Path(folder) / str(rank)).read_text().strip(), flush=True)
ray.shutdown()
