"""A training that loses a worker: ``--lose N`` kills rank 1 in its N-th step, once."""

import argparse
import os
import signal

import torch

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--lose", type=int, default=0)
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
data = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    while state.epoch < 2:
        loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=state.sampler)
        for index, batch in enumerate(loader):
            state.optimizer.zero_grad()
            (state.model(batch) ** 2).mean().backward()
            state.optimizer.step()
            state.sampler.record_batch(index, 4)
            state.steps += 1
            if (
                state.steps == args.lose
                and hvd.rank() == 1
                and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            if state.steps % 2 == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


state = hvd.elastic.TorchState(
    model=model,
    optimizer=optimizer,
    sampler=hvd.elastic.ElasticSampler(data, seed=3),
    epoch=0,
    steps=0,
)
state.register_reset_callbacks([lambda: print(f"reset: {hvd.size()} workers, step {state.steps}")])
train(state)
print(
    f"rank {hvd.rank()}: {state.steps} steps, weights "
    f"{[round(x, 9) for x in model.weight.flatten().tolist()]}"
)
