"""A training script of the kind any Lightning user has. usage: user_script.py [strategy] [start_method]"""

import sys

import lightning as L
import torch
from strategies import forced
from torch import nn


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def on_train_batch_start(self, *args):
        assert [group["momentum"] for group in self.trainer.optimizers[0].param_groups] == [0.9]

    def on_train_batch_end(self, *args):
        self.on_train_batch_start()

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            averager = self.trainer.strategy.averager
            print(f"epoch {self.current_epoch} N={averager.world} sparsity={averager.stats.sparsity:.3f}", end=" ")
            print(f"loss={self.trainer.callback_metrics['loss']:.3f}", flush=True)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    images = torch.randn(256, 1, 8, 8)
    labels = (images.mean((1, 2, 3)) * 30 + 5).long().clamp(0, 9)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 16, shuffle=True)
    strategy = forced(sys.argv[1], **({"start_method": sys.argv[2]} if len(sys.argv) > 2 else {}))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=7, accumulate_grad_batches=2, **options
    )
    trainer.fit(Net(), loader)
