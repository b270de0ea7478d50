"""A callback with a moving average of the weights, as Lightning's EMAWeightAveraging, which lightning 2.5 lacks."""

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn


class Averaging(Callback):
    """Averages parameters and buffers after each batch. `differs` is the largest difference between ranks when it is
    read: at validations, in checkpoints and after the fit."""

    def __init__(self):
        self.differs = 0.0

    def setup(self, trainer, module, stage):
        self.average = AveragedModel(module, avg_fn=get_ema_avg_fn(0.5), use_buffers=True)

    def on_train_batch_end(self, trainer, module, *args):
        self.average.update_parameters(module)

    def read(self, *args):
        own = torch.cat([each.detach().float().reshape(-1) for each in self.average.state_dict().values()])
        first = own.clone()
        dist.broadcast(first, 0)
        differs = (own - first).abs().max()
        dist.all_reduce(differs, op=dist.ReduceOp.MAX)
        self.differs = max(self.differs, float(differs))

    on_validation_epoch_start = on_train_end = read

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.read()
        checkpoint["average"] = self.average.state_dict()

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.average.load_state_dict(checkpoint["average"])
