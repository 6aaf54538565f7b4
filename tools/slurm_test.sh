#!/usr/bin/env bash
# Evaluate on a Slurm cluster with one task per GPU.
usage() {
  cat <<'USAGE'
usage: slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [OPTION OF test.py ...]

The tasks share the test set of CONFIG. If one fails, the others do its work; if all do, the same
command resumes. Environment variables:
  GPUS=8, GPUS_PER_NODE=8    GPUs of the job, and of each machine
  CPUS_PER_TASK=5            CPUs per GPU
  SRUN_ARGS                  further options for srun, for example "--time=2-0 --qos=high"
  PYTHON                     the interpreter; by default that of the active environment, or .venv's
USAGE
}
# shellcheck source=tools/launchers.sh
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 4 )) || die "needs PARTITION, JOB_NAME, CONFIG and CHECKPOINT; see --help"
partition=$1 job=$2 config=$3
shift 2
check_config "$config"
slurm "$partition" "$job" --kill-on-bad-exit=0 --no-kill -- "$tools/test.py" "$@"
