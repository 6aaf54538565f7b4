#!/usr/bin/env bash
# Train with several processes: one per GPU or, without GPUs, on the CPU.
usage() {
  cat <<'USAGE'
usage: dist_train.sh CONFIG NPROC [OPTION OF train.py ...]

NPROC processes on this machine train CONFIG together. Environment variables:
  NNODES=1, NODE_RANK=0    number of machines, and index of this one; in a Slurm step with a task
                           on each machine, those of Slurm
  MASTER_ADDR, PORT        address of the first machine and a port on it; needed if NNODES > 1
  OMP_NUM_THREADS          threads of each process; by default the processes share the cores
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT=30
                           seconds in which the processes must write a checkpoint after a signal
  PYTHON                   the interpreter; by default that of the active environment, or .venv's
USAGE
}
# shellcheck source=tools/launchers.sh
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 2 )) || die "needs CONFIG and NPROC; see --help"
config=$1 processes=$2
shift 2
check_config "$config"
torchrun "$processes" "$tools/train.py" "$config" --launcher pytorch "$@"
