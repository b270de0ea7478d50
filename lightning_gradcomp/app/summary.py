"""The result of a run: summary.json with everything needed to judge and repeat it, and a summary to print."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf

from lightning_gradcomp.app.compose import Run

PACKAGES = ("torch", "lightning", "torchvision", "numpy")


def human(size: float) -> str:
    """A number of bytes with its unit.

    >>> human(999), human(44_700_000)
    ('999 B', '44.7 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def processor() -> str:
    """The name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.processor() or platform.machine()


def collect(config: DictConfig, run: Run, communication: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Result, costs, options and hardware of a finished run, as plain values. `seconds` is the wall time of the fit."""
    trainer = run.trainer
    best = [made for made in trainer.checkpoint_callbacks if isinstance(made, ModelCheckpoint) and made.monitor]
    score = best[0].best_model_score if best else None
    cuda = trainer.strategy.root_device.type == "cuda"
    devices: Any = trainer.strategy.parallel_devices  # pyrefly: ignore[missing-attribute] - every strategy here has it
    return {
        **evaluation(config, run),
        f"best_{run.task.monitor}": None if score is None else score.item(),
        "epochs": round(trainer.global_step / run.data.epoch_steps, 2),
        "wall_seconds": seconds,
        "communication": communication,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "processor": processor(),
        "devices_per_node": len(devices),
        "gpus_per_node": len({device for device in devices if device.type == "cuda"}),
        "nodes": trainer.num_nodes,
        "cpu_cores": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def evaluation(config: DictConfig, run: Run) -> dict[str, Any]:
    """The result of the last validation, and the options."""
    return {**(run.task.result() if run.task.counts else {}), "config": OmegaConf.to_container(config)}


def write(result: dict[str, Any], words: tuple[str, str], folder: Path) -> None:
    """Write summary.json or evaluation.json, and print the result as a table that begins with `words`."""
    evaluate, ckpt = (result["config"][option] for option in ("evaluate", "ckpt"))
    name = "evaluation.json" if evaluate else "summary.json"
    (folder / name).write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{' '.join(words)} of {ckpt}" if evaluate else table(result, words, folder))


def table(result: dict[str, Any], words: tuple[str, str], folder: Path) -> str:
    """Lines to print: result, bytes, time, files."""
    config, communication = result["config"], result["communication"]
    epochs = f"{result['epochs']:g} epoch{'s' * (result['epochs'] != 1)}"
    model, data, compressor = (short(config[group]["_target_"]) for group in ("model", "data", "compressor"))
    if config["dry_run"]:
        data = "random data (dry run)"
    title = f"{model} on {data}, {compressor}, {epochs} in {result['wall_seconds']:.0f} s on {result['device']}"
    phases, gpus, ranks = communication["milliseconds"], result["gpus_per_node"], result["devices_per_node"]
    rows = {words[0]: words[1], **_sent(communication)}
    if 0 < gpus < ranks:
        rows["GPUs a node"] = f"{gpus}, shared by {ranks} processes, which exchange over gloo"
    rows["time per step"] = (
        f"{sum(phases.values()):.0f} ms: "
        + ", ".join(f"{name} {ms:.{0 if ms >= 100 else 1}f}" for name, ms in phases.items())
        + " (median)"
    )
    rows["files"] = f"{folder}{os.sep}"
    return "\n".join(["", title, *(f"  {name:<21}{text}" for name, text in rows.items())])


def short(target: str) -> str:
    """The name of a class or function."""
    return target.rpartition(".")[2]


def _sent(communication: dict[str, Any]) -> dict[str, str]:
    """Two rows: what a rank sent in the last step, or per step on average with rounds, and in total."""
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
