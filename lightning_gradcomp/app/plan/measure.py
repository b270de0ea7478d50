"""The process of `gradcomp plan`: measures a model's step and the link, and prints what follows from them.

`gradcomp_command.py --process plan MODEL ...`. What is measured is the slowest rank's, while all ranks measure.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from statistics import median

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_gradcomp.app.plan import options as plan_options
from lightning_gradcomp.app.plan import report
from lightning_gradcomp.app.plan.forecast import Computation, Forecast, Link
from lightning_gradcomp.app.plan.link import measure_link, measure_work, slowest, timed
from lightning_gradcomp.app.plan.options import DELAY_MS, NETWORKS
from lightning_gradcomp.app.plan.workload import Workload, classifier, lightning_module
from lightning_gradcomp.app.processes import hide_known_messages, in_slurm, launched, shared_gpus
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.registry import entries

TIMED_SECONDS = 3.0
"""For which steps are timed."""

FEWEST, MOST = 3, 20
"""Steps that are timed."""

HEADERS = 0.95
"""Share of a link's rate that is left by the headers of TCP and IP, in packets of 1500 bytes."""

STANDARD_MBIT = (100, 1_000, 10_000, 100_000)


def main() -> None:
    """Measure and model what `sys.argv` asks for; rank 0 prints."""
    hide_known_messages()
    warnings.filterwarnings("ignore", message=r".*self\.trainer.* reference is not registered")  # of self.log()
    try:
        options = plan_options.read(sys.argv[3:])
        device = own_device()
        workload = workload_of(options, device)
        group = join(device)
        run(options, workload, group, device)
    except ValueError as error:
        sys.exit(f"gradcomp: {error}")
    if group:
        dist.barrier(group)
        dist.destroy_process_group()


def own_device() -> torch.device:
    """This rank's GPU, which ranks share if there are more of them, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = SLURMEnvironment().local_rank() if in_slurm() else int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(device: torch.device) -> dist.ProcessGroup | None:
    """The process group of the ranks that torchrun or SLURM has started; None for a process alone."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    elif in_slurm():
        slurm = SLURMEnvironment()
        rank, world = slurm.global_rank(), slurm.world_size()
        os.environ.setdefault("MASTER_ADDR", slurm.main_address)
        os.environ.setdefault("MASTER_PORT", str(slurm.main_port))
    else:
        return None
    if world == 1:
        return None
    per_node, _ = launched() or (1, 1)
    nccl = device.type == "cuda" and not shared_gpus(device.type, per_node)
    dist.init_process_group("nccl" if nccl else "gloo", rank=rank, world_size=world)
    return dist.group.WORLD


def run(options: argparse.Namespace, workload: Workload, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Measure on all ranks; report on the first."""
    forecast = measure(workload, group, device, options.step_ms)
    links = links_of(options, group, device)
    if group is None or group.rank() == 0:
        workers = options.ranks or (group.size() if group else 2)
        run_of = (options.epochs, options.steps) if options.epochs else None
        measured_on = group.size() if group else 1
        found = report.Report(workload, forecast, links, workers, device, measured_on, options.step_ms, run_of)
        print(found.text())
        if options.out:
            report.write(found, options.out)


def workload_of(options: argparse.Namespace, device: torch.device) -> Workload:
    """The workload of the option MODEL.

    Raises:
        ValueError: a LightningModule that can't be used.
    """
    if options.model not in NETWORKS:
        return lightning_module(options.model, device)
    from torchvision.models import get_model  # of the extra `recipes`

    name = NETWORKS[options.model]
    model = get_model(name, num_classes=options.classes)
    size = options.image_size
    return classifier(name, model, device, batch=options.batch_size, size=size, classes=options.classes)


def measure(
    workload: Workload, group: dist.ProcessGroup | None, device: torch.device, step_ms: float | None = None
) -> Forecast:
    """Time the workload's step, and every registered method's work on its gradients; collective if there is a group.

    Args:
        step_ms: milliseconds of a step elsewhere; the share of backward is the one that is measured here.
    """
    computation = measure_computation(workload, group, device)
    if step_ms:
        seconds = 1e-3 * step_ms
        computation = Computation(seconds, computation.backward * seconds / computation.seconds)
    methods = {}
    for entry in entries():
        compressor = entry.cls().for_optimizer(workload.optimizer)
        gradients = Gradients(workload.model, compressor)
        methods[entry.name] = compressor, measure_work(compressor, gradients, group, workload.optimizer)
    return Forecast(workload.model, computation, methods)


def measure_computation(workload: Workload, group: dist.ProcessGroup | None, device: torch.device) -> Computation:
    """Medians of a few steps without an exchange, of the slowest rank; collective if there is a group.

    The gradients of the last step stay.
    """
    backwards: list[float] = []

    def step() -> None:
        workload.optimizer.zero_grad(set_to_none=True)
        loss = workload.loss()
        backwards.append(timed(loss.backward, device)[0])
        workload.optimizer.step()

    for _ in range(2):  # the first also allocates
        [seconds] = slowest([timed(step, device)[0]], group, device)
    backwards.clear()
    times = []
    for _ in range(min(max(FEWEST, round(TIMED_SECONDS / seconds)), MOST)):
        if group:
            dist.barrier(group)
        times.append(timed(step, device)[0])
    # the median of each step's slowest rank
    return Computation(*(median(slowest(steps, group, device)) for steps in (times, backwards)))


def links_of(options: argparse.Namespace, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Link]:
    """Description -> link: as given, measured between the ranks, or four usual ones where there is one rank."""
    if options.rate_mbit:
        delay = DELAY_MS if options.delay_ms is None else options.delay_ms
        return {f"{rate(options.rate_mbit)}, {delay:g} ms, as given": given(options.rate_mbit, delay)}
    if group:
        link = measure_link(group, device)
        words = f"{rate(link.bandwidth * 8e-6)}, {1e3 * link.latency:.2f} ms a hop, measured, N={group.size()}"
        return {words: link}
    return {rate(mbit): given(mbit, DELAY_MS) for mbit in STANDARD_MBIT}


def given(mbit: float, delay_ms: float) -> Link:
    """A link by its rate and its delay one way. A gloo message takes two: its receiver is ready first."""
    return Link(latency=2e-3 * delay_ms, bandwidth=HEADERS * mbit * 1e6 / 8)


def rate(mbit: float) -> str:
    """In Mbit/s, or Gbit/s from 1000."""
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"
