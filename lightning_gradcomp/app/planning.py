"""`python -m lightning_gradcomp.app.planning MODEL ...`: measure, model and print, in a process of its own."""

from __future__ import annotations

import argparse
import os
import sys
import warnings

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_gradcomp.app import plan, plan_report, ranks
from lightning_gradcomp.app.forecast import Forecast
from lightning_gradcomp.app.plan import DELAY_MS, NETWORKS
from lightning_gradcomp.app.quiet import quiet
from lightning_gradcomp.app.subject import Subject, classifier, lightning_module
from lightning_gradcomp.averaging.cost import Link
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.link import measure_link, measure_work
from lightning_gradcomp.registry import entries

HEADERS = 0.95
"""Share of a link's rate that TCP and IP leave to what is sent, in packets of 1500 bytes."""

STANDARD_MBIT = (100, 1_000, 10_000, 100_000)


def main() -> None:
    """Plan what the command line asks for; rank 0 prints."""
    quiet()
    warnings.filterwarnings("ignore", message=r".*self\.trainer.* reference is not registered")  # of self.log()
    try:
        options = plan.read(sys.argv[1:])
        device = own_device()
        subject = subject_of(options, device)
    except ValueError as error:
        sys.exit(f"gradcomp: {error}")
    group = join(device)
    run(options, subject, group, device)
    if group:
        dist.barrier(group)
        dist.destroy_process_group()


def own_device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = SLURMEnvironment().local_rank() if ranks.in_slurm() else int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def join(device: torch.device) -> dist.ProcessGroup | None:
    """The world that torchrun or SLURM has started this process in; None where it is alone."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    elif ranks.in_slurm():
        slurm = SLURMEnvironment()
        rank, world = slurm.global_rank(), slurm.world_size()
        os.environ.setdefault("MASTER_ADDR", slurm.main_address)
        os.environ.setdefault("MASTER_PORT", str(slurm.main_port))
    else:
        return None
    if world == 1:
        return None
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world)
    return dist.group.WORLD


def run(options: argparse.Namespace, subject: Subject, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Measure on all ranks; report on the first."""
    forecast = measure(subject, group, device)
    links = links_of(options, group, device)
    if group is None or group.rank() == 0:
        workers = options.ranks or (group.size() if group else 2)
        report = plan_report.Report(subject, forecast, links, workers, device, group.size() if group else 1)
        print(report.text())
        if options.out:
            plan_report.write(report, options.out)


def subject_of(options: argparse.Namespace, device: torch.device) -> Subject:
    """What the options call MODEL.

    Raises:
        ValueError: a module that can't be used.
    """
    if options.model not in NETWORKS:
        return lightning_module(options.model, device)
    from torchvision.models import get_model  # of the extra `recipes`

    name = NETWORKS[options.model]
    model = get_model(name, num_classes=options.classes)
    size = options.image_size
    return classifier(name, model, device, batch=options.batch_size, size=size, classes=options.classes)


def measure(subject: Subject, group: dist.ProcessGroup | None, device: torch.device) -> Forecast:
    """The subject's computation, and every registered method's work on its gradients."""
    computation = subject.measure(group, device)
    compressors = {entry.name: entry.cls() for entry in entries()}
    methods = {}
    for name, compressor in compressors.items():
        methods[name] = compressor, measure_work(compressor, Gradients(subject.model, compressor), group)
    return Forecast(subject.model, computation, methods)


def links_of(options: argparse.Namespace, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Link]:
    """In words -> the link: as given, measured between the ranks, or four usual ones where there is one rank alone."""
    if options.rate_mbit:
        delay = DELAY_MS if options.delay_ms is None else options.delay_ms
        return {f"{rate(options.rate_mbit)}, {delay:g} ms, as given": given(options.rate_mbit, delay)}
    if group:
        link = measure_link(group, device)
        words = f"{rate(link.bandwidth * 8e-6)}, {1e3 * link.latency:.2f} ms a hop, measured, N={group.size()}"
        return {words: link}
    return {rate(mbit): given(mbit, DELAY_MS) for mbit in STANDARD_MBIT}


def given(mbit: float, delay_ms: float) -> Link:
    """A link by its rate and its delay one way. A message waits for the word that its receiver is ready."""
    return Link(latency=2e-3 * delay_ms, bandwidth=HEADERS * mbit * 1e6 / 8)


def rate(mbit: float) -> str:
    """In Mbit/s, or Gbit/s from 1000."""
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


if __name__ == "__main__":
    main()
