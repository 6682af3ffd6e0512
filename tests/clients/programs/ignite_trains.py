"""ignite, which synchronises models only on backends whose names it knows."""

import ignite.distributed as idist
import torch
from common import batches, model_and_optimizer, tell
from ignite.engine import Engine


def train(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    model, optimizer = idist.auto_model(model), idist.auto_optim(optimizer)

    def step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    state = Engine(step).run(list(batches(idist.get_rank())))
    tell(model, idist.all_gather(torch.tensor([state.output])))


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train)
