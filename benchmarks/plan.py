"""How true `gradcomp plan` is: steps as it models them from what it measures, and as they are, in one run.

    python -m benchmarks.link --nodes 2 --rate-mbit 1000 -- python -m benchmarks.plan --methods dgc,onebit,powersgd

The link, the computation and each method's work are measured by the planner's own functions, on all ranks at once; the
steps as in `benchmarks.step_time`, taking turns. DDP is the dense one. One thread a process.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
import torch.distributed as dist

from benchmarks import methods as named
from benchmarks import report, step_time
from lightning_gradcomp.app import plan
from lightning_gradcomp.compressors import LossyCompressor

CPU = torch.device("cpu")


def modelled(arguments: argparse.Namespace) -> tuple[plan.Link, dict[str, float]]:
    """The measured link, and "method@topology" -> modelled seconds of a step; "ddp" is dense, "compute" alone."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model = named.network(arguments.model)
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    labels = torch.randint(10, (arguments.batch,))
    workload = plan.Workload(model, lambda: torch.nn.functional.cross_entropy(model(images), labels), named.sgd(model))
    computation, backward = plan.measure_step(workload, group, CPU)
    compressors = {name: named.compressor(name) for name in ["none", *arguments.methods.split(",")]}
    measured = {name: plan.measure_method(made, workload, group) for name, made in compressors.items()}
    made, link, n = plan.Plan(computation, backward, measured), plan.measure_link(group, CPU), group.size()
    seconds = {"compute": computation, "ddp": made.step("none", "ring", n, link).seconds}
    for name, compressor in compressors.items():
        for topology in arguments.topologies.split(","):
            if isinstance(compressor, LossyCompressor) and (
                topology == "all_gather" or not compressor.not_partitioned_because
            ):
                seconds[f"{name}@{topology}"] = made.step(name, topology, n, link).seconds
    return link, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="dgc,onebit,powersgd", help="as in benchmarks.step_time")
    parser.add_argument("--topologies", default="all_gather,two_phase,server")
    parser.add_argument("--model", default="torchvision.resnet18", help="or a name of the recipes', as resnet18")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link, seconds = modelled(arguments)
    steps = {**vars(arguments), "methods": ",".join(seconds), "optimizer": "sgd"}
    found = step_time.measure(argparse.Namespace(**steps))
    if dist.get_rank() == 0:
        errors = {name: 1e3 * modelled / found[name]["ms"] - 1 for name, modelled in seconds.items()}
        rows = [
            [name, f"{1e3 * seconds[name]:.1f}", f"{found[name]['ms']:.1f}", f"{100 * error:+.1f} %"]
            for name, error in errors.items()
        ]
        print(f"\n{arguments.model} at {arguments.size}x{arguments.size}, batch {arguments.batch}, ", end="")
        print(f"N={dist.get_world_size()}, {report.machine()}")
        print(f"link: {link.bandwidth * 8e-6:.0f} Mbit/s, {1e3 * link.latency:.2f} ms a message")
        print(report.table(["step", "modelled ms", "measured ms", "error"], rows))
        del errors["compute"]
        print(f"median absolute error, without computation alone: {100 * median(map(abs, errors.values())):.1f} %")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
