"""Train with Ray Train; when a worker dies, Ray starts all again, and they go on from the newest checkpoint.

pip install 'ray[train]'; python docs/jobs/ray_job.py FOLDER [EPOCHS]
"""

import os
import sys
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.functional import binary_cross_entropy_with_logits

import hotbed as hb
from hotbed.checkpoint import checkpoints_in, directory

ROWS, BATCH = 512, 32


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(
            tables=[hb.Table("users", rows=100, dim=16), hb.Table("items", rows=50, dim=16)],
            features=[hb.Feature("user", table="users"), hb.Feature("item", table="items")],
        )
        self.top = hb.nn.MLP(32, (16, 1), last_relu=False)

    def forward(self, ids):
        return self.top(self.embeddings(ids).concatenate())


def batches(epoch, rank, size):
    """A worker's share of every batch of an epoch; the order depends on the epoch only."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH):
        rows = rows[rank::size].tolist()
        ids = hb.Jagged.from_dict({"user": [[i * 7 % 100] for i in rows], "item": [[i * 3 % 50] for i in rows]})
        yield ids, torch.tensor([[float(i % 3 == 0)] for i in rows])


def train(config):
    """One worker; Ray has made the process group."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    folder = Path(config["folder"])
    (folder / "workers").mkdir(parents=True, exist_ok=True)
    (folder / "workers" / str(os.getpid())).write_text(str(rank))
    torch.manual_seed(1)
    model = hb.distribute(Net(), "row")
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    sparse = hb.optim.RowWiseAdagrad(model, lr=0.1)
    parts = {"model": model, "dense": dense, "sparse": sparse}
    first = 0
    if newest := checkpoints_in(directory(folder / "checkpoints")):
        first = hb.load_checkpoint(newest[-1], parts).step  # on any number of workers
    for epoch in range(first, config["epochs"]):
        for ids, labels in batches(epoch, rank, size):
            binary_cross_entropy_with_logits(model(ids), labels).backward()
            for optimizer in (dense, sparse):
                optimizer.step()
                optimizer.zero_grad()
        hb.save_checkpoint(folder / "checkpoints" / f"last-{epoch + 1:08d}", parts, step=epoch + 1)
        ray.train.report({"epoch": epoch + 1, "first": first})


def main(folder, epochs):
    result = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "epochs": epochs},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="hotbed", storage_path=str(folder / "ray"), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()
    print("ended with", result.metrics)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else 20)
