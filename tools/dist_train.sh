#!/usr/bin/env bash
# Train with several processes: one to a GPU or, without GPUs, on the CPU.
usage() {
  cat <<'USAGE'
usage: dist_train.sh CONFIG NPROC [OPTION OF train.py ...]

NPROC processes on this machine train CONFIG together. Environment variables:
  NNODES=1, NODE_RANK=0    of several machines, how many they are and which this is
  MASTER_ADDR, PORT        the first machine and a port there; a single machine needs neither
  PYTHON                   the interpreter: python, or .venv's where no environment is active
USAGE
}
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 2 )) || die "needs CONFIG and NPROC; --help tells more"
config=$1 processes=$2
shift 2
check_config "$config"
torchrun "$processes" "$tools/train.py" "$config" --launcher pytorch "$@"
