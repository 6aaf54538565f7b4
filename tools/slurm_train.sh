#!/usr/bin/env bash
# Train on a Slurm cluster with one task per GPU.
usage() {
  cat <<'USAGE'
usage: slurm_train.sh PARTITION JOB_NAME CONFIG [OPTION OF train.py ...]

Environment variables:
  GPUS=8, GPUS_PER_NODE=8    GPUs of the job, and of each machine
  CPUS_PER_TASK=5            CPUs per GPU
  SRUN_ARGS                  further options for srun, for example "--time=2-0 --signal=USR1@120"
  PYTHON                     the interpreter; by default that of the active environment, or .venv's
USAGE
}
# shellcheck source=tools/launchers.sh
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 3 )) || die "needs PARTITION, JOB_NAME and CONFIG; see --help"
partition=$1 job=$2 config=$3
shift 3
check_config "$config"
slurm "$partition" "$job" --kill-on-bad-exit=1 -- "$tools/train.py" "$config" "$@"
