"""DistributedDataParallel by hand: mp.spawn starts the workers, DistributedSampler deals out the
data.

One worker a GPU over nccl; without GPUs two workers over gloo. `examples/digits` does the same with
one argument.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from lenet import LeNet, accuracy, digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 20


def main_worker(rank: int, world_size: int, init_method: str, saved: str) -> None:
    """One worker; mp.spawn gives it its number."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=init_method, world_size=world_size, rank=rank
    )

    # Initial weights differ, until DistributedDataParallel sends those of rank 0 to all.
    torch.manual_seed(rank)
    bare = LeNet().to(device)
    model = DistributedDataParallel(bare, device_ids=[rank] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = digits()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, shuffle=(sampler is None), sampler=sampler)

    first_batches = set()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        first_batches.add(tuple(list(sampler)[:32]))
        model.train()
        total = 0.0
        for images, targets in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
        if rank == 0 and epoch % 5 == 4:
            print(
                f"epoch {epoch + 1}: loss {total / len(loader):.4f}, accuracy "
                f"{accuracy(bare, test, device):.3f}"
            )

    weights = torch.cat([p.detach().flatten() for p in bare.parameters()])
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, src=0)
    assert torch.equal(weights, of_rank_0), "the workers' weights differ"
    assert len(first_batches) == EPOCHS, "set_epoch did not change the order"
    if rank == 0:  # one checkpoint a world, not one a worker
        torch.save(bare.state_dict(), saved)
    dist.destroy_process_group()


def main() -> None:
    """Start the workers, and look at what they saved."""
    world_size = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        # The workers meet in a file of their own: no port has to be chosen, so none can be taken
        # meanwhile.
        saved = str(Path(folder) / "lenet.pt")
        mp.spawn(main_worker, nprocs=world_size, args=(world_size, f"file://{folder}/meet", saved))
        model = LeNet()
        model.load_state_dict(torch.load(saved, weights_only=True))
    reached = accuracy(model, digits()[1])
    print(f"{world_size} workers, equal weights; accuracy of the saved model {reached:.3f}")
    assert reached > 0.95, reached


if __name__ == "__main__":  # mp.spawn runs this file again in every worker
    main()
