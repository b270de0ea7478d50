"""The result of a run: summary.json with everything needed to judge and repeat it, and a summary to print."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gradcomp.app.classifier import Classifier
from lightning_gradcomp.app.config import Run
from lightning_gradcomp.app.env import processor, versions
from lightning_gradcomp.app.run_folder import values_of
from lightning_gradcomp.app.sizes import human

DRY = "random images (dry run)"


def collect(
    run: Run, trainer: L.Trainer, classifier: Classifier, communication: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Result, costs, options and hardware of a finished run, as plain values. `seconds`: wall time of the fit."""
    best = trainer.checkpoint_callback  # the first of the two; there is none in a dry run
    score = best.best_model_score if isinstance(best, ModelCheckpoint) else None
    devices: Any = trainer.strategy.parallel_devices  # pyrefly: ignore[missing-attribute] - every strategy here has it
    return {
        "val_acc": classifier.correct / classifier.images,
        "val_correct": classifier.correct,
        "val_images": classifier.images,
        "best_val_acc": None if score is None else score.item(),
        "epochs": trainer.current_epoch,
        "wall_seconds": seconds,
        "communication": communication,
        "config": values_of(run),
        "device": torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else "CPU",
        "processor": processor(),
        "devices_per_node": trainer.num_devices,
        "gpus_per_node": len({device for device in devices if device.type == "cuda"}),
        "nodes": trainer.num_nodes,
        "cpu_cores": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": versions(),
    }


def write(result: dict[str, Any], folder: Path) -> None:
    """Write summary.json."""
    (folder / "summary.json").write_text(json.dumps(result, indent=2) + "\n")


def write_evaluation(run: Run, classifier: Classifier, folder: Path) -> None:
    """Write evaluation.json."""
    counts = {"val_correct": classifier.correct, "val_images": classifier.images}
    content = {"val_acc": classifier.correct / classifier.images, **counts, "ckpt": run.ckpt, "packages": versions()}
    (folder / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n")


def accuracy(correct: int, images: int) -> str:
    """As in `98.06% (353 of 360 images)`."""
    return f"{correct / images:.2%} ({correct} of {images} images)"


def table(result: dict[str, Any], folder: Path) -> str:
    """Lines to print: accuracy, bytes, time, files."""
    config, communication = result["config"], result["communication"]
    epochs = f"{result['epochs']} epoch{'s' * (result['epochs'] > 1)}"
    model = config["model"]["target"] or config["model"]["name"]
    title = (
        f"{model} on {DRY if config['dry_run'] else config['data']['name']}, "
        f"compressor {config['compressor']['name']}, "
        f"{epochs} in {result['wall_seconds']:.0f} s on {result['device']}"
    )
    phases = communication["milliseconds"]
    rows = {
        "validation accuracy": accuracy(result["val_correct"], result["val_images"]),
        **_sent(communication),
        **_sharing(result["gpus_per_node"], result["devices_per_node"]),
        "time per step": f"{sum(phases.values()):.0f} ms: "
        + ", ".join(f"{name} {ms:.{0 if ms >= 100 else 1}f}" for name, ms in phases.items())
        + " (median)",
        "files": f"{folder}{os.sep}",
    }
    return "\n".join(["", title, *(f"  {name:<21}{text}" for name, text in rows.items())])


def _sent(communication: dict[str, Any]) -> dict[str, str]:
    """Two rows: what a rank sent in the last step (of rounds: on average), and in all."""
    world, sent, dense = (communication[key] for key in ("world_size", "bytes_sent", "dense_bytes"))
    shards = communication.get("shards")
    if world == 1:
        return {"sent": "nothing: there is one replica" if shards else "nothing: there is one process"}
    in_all = {"sent in all": f"{human(sent)}; uncompressed {human(dense)}, {communication['ratio']:.1f}x as much"}
    if rounds := communication.get("rounds"):
        each = f"{human(sent / communication['steps'])} by each of {world} processes, on average"
        late = f"{rounds['rounds']} of {rounds['period']} steps, applied {rounds['delay']} steps late"
        return {"sent per step": each, "rounds": late, **in_all}
    last = communication["last_step"]
    ranks = f"{world * shards} processes, between {world} replicas" if shards else f"{world} processes"
    each = f"{human(last['bytes_sent'])} by each of {ranks} ({communication['topology']})"
    return {"sent per step": f"{each}; uncompressed {last['ratio']:.0f}x as much", **in_all}


def _sharing(gpus: int, ranks: int) -> dict[str, str]:
    """A row, if ranks share GPUs."""
    return {"GPUs a node": f"{gpus}, shared by {ranks} processes, which exchange over gloo"} if 0 < gpus < ranks else {}
