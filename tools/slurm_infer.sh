#!/usr/bin/env bash
# Run a model on images on a Slurm cluster with one task per GPU.
usage() {
  cat <<'USAGE'
usage: slurm_infer.sh PARTITION JOB_NAME CONFIG CHECKPOINT INPUT... [OPTION OF infer.py ...]

The tasks share the images and, with --tile, the rows of tiles. If one fails, the others do its
work; if all do, the same command resumes. Environment variables:
  GPUS=8, GPUS_PER_NODE=8    GPUs of the job, and of each machine
  CPUS_PER_TASK=5            CPUs per GPU
  SRUN_ARGS                  further options for srun, for example "--time=2-0 --qos=high"
  PYTHON                     the interpreter; by default that of the active environment, or .venv's
USAGE
}
# shellcheck source=tools/launchers.sh
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 4 )) || die "needs PARTITION, JOB_NAME, a model and inputs; see --help"
partition=$1 job=$2
shift 2
slurm "$partition" "$job" --kill-on-bad-exit=0 --no-kill -- "$tools/infer.py" "$@"
