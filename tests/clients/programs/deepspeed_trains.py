"""DeepSpeed with the backend's name. ZeRO shards nothing (stage 0), the optimizer (1), gradients (2), weights (3)."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from common import batches, model_and_optimizer, tell

deepspeed.init_distributed(dist_backend=sys.argv[1])
stage = int(sys.argv[2])
model, _ = model_and_optimizer()
settings = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
)
losses = []
for inputs, targets in batches(engine.global_rank):
    loss = torch.nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    losses.append(loss.detach())
mean = torch.stack(losses)
torch.distributed.all_reduce(mean)
with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
    copy, _ = model_and_optimizer()
    for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        mine.data.copy_(theirs.data)
tell(copy, mean)
torch.distributed.destroy_process_group()
