"""Train with Lightning; after a kill, the same command goes on from the newest checkpoint.

torchrun --standalone --nproc_per_node 2 --max-restarts 3 docs/jobs/lightning_job.py FOLDER [EPOCHS]
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import binary_cross_entropy_with_logits

import hotbed as hb
from hotbed.config import ParallelRecipe
from hotbed.train.ranks.process_group import process_group

ROWS = 512


class Clicks(torch.utils.data.Dataset):
    """Users and items with a label; the same in every process."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return i * 7 % 100, i * 3 % 50, float(i % 3 == 0)


def collate(rows):
    users, items, labels = zip(*rows, strict=True)
    ids = hb.Jagged.from_dict({"user": [[u] for u in users], "item": [[i] for i in items]})
    return ids, torch.tensor(labels)[:, None]


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


class LitNet(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = Net()

    def configure_model(self):
        if not self.net.embeddings.is_distributed:
            self.net = hb.distribute(self.net, "row")

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=0.01), hb.optim.RowWiseAdagrad(self.net, lr=0.1)

    def training_step(self, batch, number):
        ids, labels = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(binary_cross_entropy_with_logits(self.net(ids), labels))
        for optimizer in self.optimizers():
            optimizer.step()


def main(folder, epochs):
    lightning.seed_everything(1)
    # Between epochs, where the position in the data is known; last.ckpt is the newest.
    checkpoints = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(Clicks(), batch_size=32, collate_fn=collate, shuffle=True)
    newest = folder / "last.ckpt"
    trainer.fit(LitNet(), data, ckpt_path=newest if newest.exists() else None, weights_only=True)
    trainer.save_checkpoint(folder / "final.ckpt")


if __name__ == "__main__":
    # Lightning takes the group that is there. Its own would look for the dead ranks when torchrun starts all again.
    with process_group(ParallelRecipe(timeout_s=120), "cpu"):
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20)
