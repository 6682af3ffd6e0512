"""The Trainer of transformers, whose `ddp_backend` knows a list of names."""

import tempfile

import torch
from common import batches, model_and_optimizer, tell
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Rows(Dataset):
    """A data set, from which the Trainer gives every rank a different part."""

    def __init__(self) -> None:
        self.rows = [pair for inputs, targets in batches(0, 4) for pair in zip(inputs, targets, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, labels = self.rows[index]
        return {"inputs": inputs, "labels": labels}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, _ = model_and_optimizer()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, ddp_backend="gloo", num_train_epochs=1, per_device_train_batch_size=8, report_to=[]
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    outcome = trainer.train()
    tell(trainer.model, [torch.tensor(outcome.training_loss), torch.tensor(trainer.evaluate()["eval_loss"])])
