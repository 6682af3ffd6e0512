"""Trains with Lightning Fabric, which gets the backend's name, and sums a metric of torchmetrics over the ranks."""

import sys

import torch
import torchmetrics
from common import batches, model_and_optimizer, tell
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=sys.argv[1]))
fabric.launch()
model, optimizer = fabric.setup(*model_and_optimizer())
metric = torchmetrics.MeanSquaredError()
for inputs, targets in batches(fabric.global_rank):
    outputs = model(inputs)
    fabric.backward(torch.nn.functional.mse_loss(outputs, targets))
    optimizer.step()
    optimizer.zero_grad()
    metric.update(outputs.detach(), targets)
tell(model, [metric.compute()])
