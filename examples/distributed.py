"""One fit by all processes of a job, each with its shard of the data.

    python examples/distributed.py                                       # one process
    torchrun --nproc-per-node 2 examples/distributed.py                  # two on this machine
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d \\
        --rdzv-endpoint first-machine:29500 examples/distributed.py      # the same command on each of four machines
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import whence


def start():
    """This process's rank, how many there are, and its device; one process without torchrun."""
    if "RANK" not in os.environ:
        return 0, 1, torch.device("cpu")
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    return dist.get_rank(), dist.get_world_size(), device


def shard(dataset, rank, world):
    """Examples in the order of the data set: the first ones to rank 0, the next ones to rank 1, and so on."""
    first, last = (len(dataset) * at // world for at in (rank, rank + 1))
    return Subset(dataset, range(first, last))


def main():
    rank, world, device = start()
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 301).unsqueeze(1)
    y = torch.sin(x) + 0.1 * torch.randn_like(x)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
        optimizer.step()

    loader = DataLoader(shard(TensorDataset(x, y), rank, world), batch_size=32)
    folder = os.environ.get("CHECKPOINT")  # where rank 0 writes sums down, if anywhere
    tracer = whence.fit(
        model.eval(), loader, structure="core", ridge=0.3, recenter=True, execution=whence.Execution(checkpoint=folder)
    )

    inputs = DataLoader(shard(TensorDataset(torch.linspace(-4, 4, 9).unsqueeze(1)), rank, world), batch_size=4)
    found = whence.gather(tracer.predict([batch[0] for batch in inputs]))  # of all processes, in order
    if rank == 0:
        print(f"{world} process{'es' * (world > 1)}, {tracer.problem.n} examples, {len(found)} predictions")
        print("standard errors:", *(f"{error:.3f}" for error in found.hec3.sqrt().flatten().tolist()))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
