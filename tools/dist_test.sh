#!/usr/bin/env bash
# Evaluate with several processes: one to a GPU or, without GPUs, on the CPU.
usage() {
  cat <<'USAGE'
usage: dist_test.sh CONFIG CHECKPOINT NPROC [OPTION OF test.py ...]

NPROC processes on this machine share the test set of CONFIG. Environment variables:
  NNODES=1, NODE_RANK=0    of several machines, how many they are and which this is
  MASTER_ADDR, PORT        the first machine and a port there; a single machine needs neither
  PYTHON                   the interpreter: python, or .venv's where no environment is active
USAGE
}
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 3 )) || die "needs CONFIG, CHECKPOINT and NPROC; --help tells more"
config=$1 checkpoint=$2 processes=$3
shift 3
check_config "$config"
torchrun "$processes" "$tools/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
