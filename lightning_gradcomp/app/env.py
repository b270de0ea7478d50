"""`gradcomp env`: versions and hardware, for a bug report."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

PACKAGES = (
    "lightning-gradcomp",
    "torch",
    "lightning",
    "torchvision",
    "hydra-core",
    "omegaconf",
    "numpy",
    "scikit-learn",
)
PREFIXES = ("SLURM_N", "GLOO_", "NCCL_", "TORCH_", "OMP_", "CUDA_VISIBLE", "MASTER_", "WORLD_SIZE", "RANK")


def versions() -> dict[str, str | None]:
    """Package -> its version; None for one that isn't installed."""
    return {package: installed(package) for package in PACKAGES}


def installed(package: str) -> str | None:
    """The version of `package`; None where it isn't installed, such as a checkout on PYTHONPATH."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of the checkout that this package is in, if it is in one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return "not a checkout"
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or files of another owner
        return "unknown"


def processor() -> str:
    """The processor's name, or its architecture where /proc/cpuinfo is missing."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()


def report() -> str:
    """Lines of `name  value`."""
    backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    lines = {
        **{package: found or "not installed" for package, found in versions().items()},
        "commit": commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a process",
        "GPUs": ", ".join(cards) or "none",
        "CUDA": str(torch.version.cuda),
        "backends": ", ".join(backends),
        "environment": ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)) or "-",
    }
    return "\n".join(f"{name:<20}{text}" for name, text in lines.items())
