#!/usr/bin/env bash
# Two machines without a scheduler: run this on both, first and second differ in one number.
#
#     MASTER=10.0.0.1 NODE=0 ./two_nodes_torchrun.sh recipe=resnet50_cifar10      # on 10.0.0.1
#     MASTER=10.0.0.1 NODE=1 ./two_nodes_torchrun.sh recipe=resnet50_cifar10      # on the other
#
# GPUS: processes on each machine (default: its GPUs, or one on the CPU). Where a machine has several networks, name the
# one between them for gloo and NCCL: GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1.
set -euo pipefail
: "${MASTER:?the address of the first machine}" "${NODE:?0 on the first machine, 1 on the second}"
GPUS=${GPUS:-$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)}
if [[ ! $GPUS =~ ^[0-9]{1,4}$ ]]; then
    echo "GPUS: got '$GPUS', allowed: a whole number" >&2
    exit 1
fi
GPUS=$((10#$GPUS))
export PYTHONSAFEPATH=1 # from Python 3.11 on: modules of the working folder replace no others
exec torchrun --nnodes=2 --node-rank="$NODE" --nproc-per-node="$((GPUS > 0 ? GPUS : 1))" \
    --master-addr="$MASTER" --master-port="${PORT:-29500}" -m lightning_gradcomp "$@"
