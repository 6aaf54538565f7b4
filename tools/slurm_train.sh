#!/usr/bin/env bash
# usage: [GPUS=8] [GPUS_PER_NODE=8] [CPUS_PER_TASK=5] [SRUN_ARGS=...] \
#          slurm_train.sh PARTITION JOB_NAME CONFIG [OPTION OF train.py ...]
# Train on a Slurm cluster with one task per GPU.
[ $# -ge 3 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
# Without an activated environment, that of `make setup`.
[ "${VIRTUAL_ENV-}${CONDA_PREFIX-}" ] || PATH=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin:$PATH
# shellcheck disable=SC2086  # SRUN_ARGS is several words
srun -p "$1" --job-name="$2" --gres=gpu:"${GPUS_PER_NODE:-8}" --ntasks="${GPUS:-8}" \
  --ntasks-per-node="${GPUS_PER_NODE:-8}" --cpus-per-task="${CPUS_PER_TASK:-5}" \
  --kill-on-bad-exit=1 ${SRUN_ARGS-} \
  "${PYTHON:-python}" -u "$(dirname "$0")/train.py" "$3" --launcher slurm "${@:4}"
