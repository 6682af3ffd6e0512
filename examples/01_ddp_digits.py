"""Trains a digit classifier on 4 ranks with DistributedDataParallel, then again on Gloo, and compares the weights.

    torchrun --nproc-per-node 4 examples/01_ddp_digits.py

The data are scikit-learn's 1797 scanned digits of 8 x 8 pixels. Both trainings start from the same seed and see the
same batches in the same order. A gradient summed in another order differs in its last bit, and training amplifies that:
with float32 weights, summing in rank order instead of Gloo's order moves some weight by 8e-3 after 12 epochs (measured;
the accuracy stays), with float64 by 3e-15. The model is therefore float64; `--dtype float32` shows the drift.

The time in communication is measured by a DDP communication hook: from the moment a bucket of gradients is handed to
all_reduce until its future completes, so waiting for the slowest rank is part of it.
"""

import argparse
import gc
import os
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCH, TEST_IMAGES, SEED = 12, 32, 360, 7


@dataclass
class Digits:
    """Training and test images (N, 1, 8, 8) in 0..1 and their labels."""

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]


@dataclass
class CommunicationClock:
    """Adds up the seconds between the start of each all_reduce of gradients and its completion."""

    group: dist.ProcessGroup
    seconds: float = 0.0
    calls: int = 0
    sizes: set[int] = field(default_factory=set)

    def hook(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket over the group, as DDP does without a hook."""
        gradients = bucket.buffer().div_(self.group.size())
        self.sizes.add(gradients.nbytes)
        start = time.perf_counter()
        work = dist.all_reduce(gradients, group=self.group, async_op=True)

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self.seconds += time.perf_counter() - start
            self.calls += 1
            return future.value()[0]

        return work.get_future().then(done)


def load(dtype: torch.dtype) -> Digits:
    """Splits the digits into training and test images, the same way on every rank."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=dtype).unsqueeze(1) / 16
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Digits((images[train], labels[train]), (images[test], labels[test]))


def new_model(dtype: torch.dtype) -> nn.Module:
    """A small convolutional network, 43,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 72), nn.ReLU(), nn.Linear(72, 10),
    ).to(dtype)  # fmt: skip


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Share of test images classified rightly."""
    with torch.no_grad():
        images, labels = digits.test
        return (model(images).argmax(dim=1) == labels).double().mean().item()


def train(name: str, group: dist.ProcessGroup, digits: Digits, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Trains from the seed with gradients averaged over ``group``; all weights in one vector, and the accuracy."""
    torch.manual_seed(SEED)
    rank, world = group.rank(), group.size()
    clock = CommunicationClock(group)
    model = DistributedDataParallel(new_model(dtype), process_group=group)
    model.register_comm_hook(None, clock.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = digits.train
    per_rank = len(images) // world
    started = time.perf_counter()
    for epoch in range(1, EPOCHS + 1):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        mine = order[rank::world][:per_rank]
        total = torch.zeros((), dtype=torch.float64)
        for batch in mine.split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach().double() * len(batch)
        if epoch == 1 or epoch % 3 == 0:
            dist.all_reduce(total, group=group)
            if rank == 0:
                mean = total.item() / (per_rank * world)
                share = accuracy(model.module, digits)
                print(f"{name}: epoch {epoch:2}/{EPOCHS}  loss {mean:.4f}  test accuracy {share:.1%}", flush=True)
    seconds = time.perf_counter() - started
    share = accuracy(model.module, digits)
    if rank == 0:
        kilobytes = "+".join(f"{size / 1024:.0f}" for size in sorted(clock.sizes))
        print(
            f"{name}: {seconds:.2f} s, of which {clock.seconds:.2f} s ({clock.seconds / seconds:.0%}) in "
            f"{clock.calls} all_reduce calls of {kilobytes} KB, {clock.seconds / clock.calls * 1e6:.0f} µs each",
            flush=True,
        )
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return weights, share


def main() -> None:
    """Trains on the chosen backend and on Gloo.

    Raises:
        RuntimeError: the ranks or the two trainings disagree, or the classifier is bad.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    given = parser.parse_args()
    dtype = torch.float64 if given.dtype == "float64" else torch.float32
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    digits = load(dtype)
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for parameter in new_model(dtype).parameters())
        print(
            f"{len(digits.train[0])} training and {len(digits.test[0])} test images, {count} parameters "
            f"({given.dtype}), {dist.get_world_size()} ranks",
            flush=True,
        )
    weights, share = train(given.backend, dist.group.WORLD, digits, dtype)
    first = weights.clone()
    dist.broadcast(first, 0)
    if not torch.equal(first, weights):
        raise RuntimeError(f"rank {dist.get_rank()} ends with other weights than rank 0")
    reference, _ = train("gloo (again)", dist.new_group(backend="gloo"), digits, dtype)
    difference = (weights - reference).abs().max().item()
    if share <= 0.95:
        raise RuntimeError(f"test accuracy is {share:.1%}, expected more than 95 %")
    if difference > 1e-6:
        raise RuntimeError(f"weights differ from the training on gloo by up to {difference:.2e}, more than 1e-6")
    if dist.get_rank() == 0:
        print(f"ok: test accuracy {share:.1%}; largest weight difference to gloo {difference:.1e} (limit 1e-6)")
    # DDP's modules may be reference cycles that hold the group of Gloo, which aborts if it dies at interpreter exit.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
