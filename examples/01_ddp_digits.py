"""Trains a digit classifier with DistributedDataParallel, on symm and on Gloo alternately, and compares both.

    torchrun --nproc-per-node 4 examples/01_ddp_digits.py      # no more ranks than cores; make demo takes 2 to 4

The data are scikit-learn's 1797 scanned digits of 8 x 8 pixels. Both trainings start from the same seed and see the
same batches in the same order. A gradient summed in another order differs in its last bit, and training amplifies that:
with float32 weights, summing in rank order instead of Gloo's order moves some weight by 8e-3 after 12 epochs (measured;
the accuracy stays), with float64 by 3e-15. The model is therefore float64; `--dtype float32` shows the drift.

The time in communication is measured by a DDP communication hook: from the moment a bucket of gradients is passed to
all_reduce until its future completes, so waiting for the slowest rank is part of it. The program also prints the
time of a bare call: all_reduce of the same size, one call after the other.
"""

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, TEST_IMAGES, SEED = 32, 360, 7
BARE_CALLS = 200


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
    """Share of test images that are classified correctly."""
    with torch.no_grad():
        images, labels = digits.test
        return (model(images).argmax(dim=1) == labels).double().mean().item()


class Training:
    """A model that is trained from the seed, with gradients averaged over ``group``; counts its time."""

    def __init__(self, name: str, group: dist.ProcessGroup, digits: Digits, dtype: torch.dtype) -> None:
        torch.manual_seed(SEED)
        self.name, self.group, self.digits = name, group, digits
        self.clock = CommunicationClock(group)
        self.model = DistributedDataParallel(new_model(dtype), process_group=group)
        self.model.register_comm_hook(None, self.clock.hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.seconds = 0.0

    def run(self, epoch: int) -> float:
        """Trains for one epoch; returns the sum of this rank's losses."""
        images, labels = self.digits.train
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        mine = order[self.group.rank() :: self.group.size()][: len(images) // self.group.size()]
        total = 0.0
        started = time.perf_counter()
        for batch in mine.split(BATCH):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(images[batch]), labels[batch])
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(batch)
        self.seconds += time.perf_counter() - started
        return total

    def report(self, epoch: int, epochs: int, loss: float) -> None:
        """Prints the mean loss of all ranks and the accuracy; every rank must call it."""
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        mean = total.item() / (len(self.digits.train[0]) // self.group.size() * self.group.size())
        if self.group.rank() == 0:
            share = accuracy(self.model.module, self.digits)
            print(f"{self.name}: epoch {epoch:2}/{epochs}  loss {mean:.4f}  test accuracy {share:.1%}", flush=True)

    def weights(self) -> torch.Tensor:
        """All weights in one vector."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def train_in_turn(trainings: list[Training], epochs: int) -> None:
    """Trains all models in alternating epochs and alternating order, so that a disturbance affects all of them."""
    for epoch in range(1, epochs + 1):
        for training in trainings if epoch % 2 else trainings[::-1]:
            loss = training.run(epoch)
            if epoch == 1 or epoch % 3 == 0:
                training.report(epoch, epochs, loss)


def bare_us(group: dist.ProcessGroup, size: int) -> float:
    """The median of calls of all_reduce of ``size`` bytes, one after the other, in µs; every rank must call it."""
    tensor = torch.zeros(size // 8, dtype=torch.float64)
    times = []
    for _ in range(BARE_CALLS):
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def compare(trainings: list[Training]) -> None:
    """Prints how each training has spent its time; every rank must call it."""
    bare = [sum(bare_us(training.group, size) for size in training.clock.sizes) for training in trainings]
    if dist.get_rank() != 0:
        return
    world, cores = dist.get_world_size(), len(os.sched_getaffinity(0))
    if world > cores:
        print(
            f"note: {world} ranks share {cores} cores: a rank that waits takes time from one that computes", flush=True
        )
    for training, us in zip(trainings, bare, strict=True):
        clock = training.clock
        kilobytes = "+".join(f"{size / 1024:.0f}" for size in sorted(clock.sizes))
        print(
            f"{training.name:>5}: {training.seconds:.2f} s, of which {clock.seconds:.2f} s "
            f"({clock.seconds / training.seconds:.0%}) in {clock.calls} all_reduce calls of {kilobytes} KB, "
            f"{clock.seconds / clock.calls * 1e6:.0f} µs each; "
            f"a bare call takes {us / len(clock.sizes):.0f} µs",
            flush=True,
        )


def main() -> None:
    """Trains on the chosen backend and on Gloo.

    Raises:
        RuntimeError: the ranks or the two trainings disagree, or the classifier is bad.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--epochs", type=int, default=12)
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
    # The first batches include shared one-time costs: threads, caches, DDP's second layout of its buckets.
    for group in (mine := dist.group.WORLD, gloo := dist.new_group(backend="gloo")):
        Training("warm-up", group, digits, dtype).run(0)
    trainings = [Training(given.backend, mine, digits, dtype), Training("gloo", gloo, digits, dtype)]
    train_in_turn(trainings, given.epochs)
    weights, reference = (training.weights() for training in trainings)
    share = accuracy(trainings[0].model.module, digits)
    first = weights.clone()
    dist.broadcast(first, 0)
    if not torch.equal(first, weights):
        raise RuntimeError(f"rank {dist.get_rank()} ends with other weights than rank 0")
    difference = (weights - reference).abs().max().item()
    if share <= 0.95:
        raise RuntimeError(f"test accuracy is {share:.1%}, expected more than 95 %")
    if difference > 1e-6:
        raise RuntimeError(f"weights differ from the training on gloo by up to {difference:.2e}, more than 1e-6")
    compare(trainings)
    if dist.get_rank() == 0:
        print(f"ok: test accuracy {share:.1%}; largest weight difference to gloo {difference:.1e} (limit 1e-6)")
    del trainings
    # DDP's modules may be reference cycles that hold the group of Gloo, which aborts if it dies at interpreter exit.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
