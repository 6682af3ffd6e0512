"""Accelerate trains a model on two ranks; it chooses the backend from a list of names."""

import accelerate
import torch
from common import batches, model_and_optimizer, tell

accelerator = accelerate.Accelerator(cpu=True)
model, optimizer = accelerator.prepare(*model_and_optimizer())
for inputs, targets in batches(accelerator.process_index):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
gathered = accelerator.gather(loss.detach().reshape(1))
tell(model, [*gathered, loss])
accelerator.end_training()
