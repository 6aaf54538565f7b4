#!/usr/bin/env bash
# usage: [NNODES=1] [NODE_RANK=0] [MASTER_ADDR=127.0.0.1] [PORT=29500] \
#          dist_test.sh CONFIG CHECKPOINT GPUS [OPTION OF test.py ...]
# Evaluate with GPUS processes on this machine: one per GPU or, without GPUs, on the CPU.
[ $# -ge 3 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
# Without an activated environment, that of `make setup`.
[ "${VIRTUAL_ENV-}${CONDA_PREFIX-}" ] || PATH=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin:$PATH
"${PYTHON:-python}" -m torch.distributed.run \
  --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$3" \
  --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
  "$(dirname "$0")/test.py" "$1" "$2" --launcher pytorch "${@:4}"
