#!/usr/bin/env bash
# Evaluate with several processes: one per GPU or, without GPUs, on the CPU.
usage() {
  cat <<'USAGE'
usage: dist_test.sh CONFIG CHECKPOINT NPROC [OPTION OF test.py ...]

NPROC processes on this machine share the test set of CONFIG. If one is killed, the others do its
work; if all are, the same command resumes. Several machines need a common work dir, and run the
same command. Environment variables:
  NNODES=1, NODE_RANK=0    number of machines, and index of this one; in a Slurm step with a task
                           on each machine, those of Slurm
  OMP_NUM_THREADS          threads of each process; by default the processes share the cores
  PYTHON                   the interpreter; by default that of the active environment, or .venv's
USAGE
}
# shellcheck source=tools/launchers.sh
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 3 )) || die "needs CONFIG, CHECKPOINT and NPROC; see --help"
config=$1 checkpoint=$2 processes=$3
shift 3
check_config "$config"
share "$processes" "$tools/test.py" "$config" "$checkpoint" "$@"
