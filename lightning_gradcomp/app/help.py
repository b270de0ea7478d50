"""`gradcomp --help`. Hydra would make the same of a template, but copies all that is registered for each group."""

from __future__ import annotations

from lightning_gradcomp.app.compose import choices

USAGE = """\
gradcomp [group=option ...] [group.key=value ...]

Train with compressed gradients. Without arguments: ResNet-18 on handwritten digits, a few minutes on two CPU cores.

  gradcomp strategy=ddp_dense                                 the same without compression; = compressor=none
  gradcomp compressor.sparsity=0.99 trainer.max_epochs=20     any option by its name
  gradcomp -m compressor=none,dgc seed=0,1,2                  a sweep: all six, one after the other
  gradcomp --cfg job -p compressor                            show options and don't train (without -p: all)
  gradcomp ckpt=last                                          resume the newest run, with the words that it had
  gradcomp dry_run=true recipe=resnet50_imagenet              four steps on random images: does everything fit?
  gradcomp recipes | compressors | report RUN... | env        what there is; figures of runs; facts for a bug report
  gradcomp server [HOST:PORT] ... | join HOST:PORT ...        a parameter server, and workers that come and go
  gradcomp plan resnet18 --rate-mbit 1000                     don't train: what would compression gain? (plan --help)

Results go to runs/<date_time>/. Tab completion: eval "$(gradcomp -sc install=bash)". Hydra's own: --hydra-help.

Groups, group=option:
"""


def page() -> str:
    """What there is to say, and the choices of every group."""
    return "\n".join([USAGE, *(f"{group}: {', '.join(names)}" for group, names in choices().items())])
