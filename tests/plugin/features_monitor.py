"""What the CommunicationMonitor writes into metrics.csv, over a fit, one that goes on from it, and a validation.

Part of `features.py`.
"""

import csv

import torch
from features_kit import FOLDER, RANK, Net, fit, forced, loader
from lightning.pytorch.loggers import CSVLogger

import lightning_gradcomp as lgc


class Validated(Net):
    """With a validation after each epoch, and a sanity check before the first."""

    def val_dataloader(self):
        return loader(2)


def monitored():
    """One dense epoch; then, from its checkpoint, a compressed one. Every other step is logged."""
    ran = []
    for epochs, path in ((1, None), (2, FOLDER / "monitored.ckpt")):
        monitor, logger = lgc.CommunicationMonitor(), CSVLogger(FOLDER, "monitored", version=epochs)
        dense_first = lgc.DGC(sparsity=0.9, min_elements=32, dense_epochs=1, warmup_epochs=0)
        trainer, _ = fit(
            forced(compressor=dense_first), Validated, epochs=epochs, ckpt_path=path, callbacks=[monitor],
            logger=logger, log_every_n_steps=2, num_sanity_val_steps=1,
        )  # fmt: skip
        trainer.save_checkpoint(FOLDER / "monitored.ckpt")
        ran.append({"summary": monitor.summary(), "logger": logger})
    trainer.validate(trainer.lightning_module, verbose=False)
    finished = lgc.CommunicationMonitor()
    fit(forced(compressor=dense_first), Validated, ckpt_path=FOLDER / "monitored.ckpt", callbacks=[finished])
    saved = torch.load(FOLDER / "monitored.ckpt", weights_only=True)["callbacks"]["CommunicationMonitor"]
    return RANK == 0 and {
        "summaries": [run["summary"] for run in ran],
        "rows": [rows(run["logger"].log_dir) for run in ran],
        "saved": saved,
        "finished": finished.summary(),
    }


def rows(folder):
    """Of metrics.csv: what each has of every name that has a value there."""
    with open(f"{folder}/metrics.csv") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


FEATURES = (monitored,)
