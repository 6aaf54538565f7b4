#!/usr/bin/env bash
# Evaluate with several processes: one to a GPU or, without GPUs, on the CPU.
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage() {
  cat <<'USAGE'
usage: dist_test.sh CONFIG CHECKPOINT NPROC [OPTION OF test.py ...]

NPROC processes on this machine share the test set of CONFIG. Environment variables:
  NNODES=1, NODE_RANK=0    of several machines, how many they are and which this is
  MASTER_ADDR, PORT        the first machine and a port there; a single machine needs neither
  PYTHON                   the interpreter: python, or .venv's where no environment is active
USAGE
}
die() { echo "dist_test.sh: $*" >&2; exit 2; }

if [[ " $* " =~ " -h "|" --help " ]]; then usage; exit; fi
(( $# >= 3 )) || die "needs CONFIG, CHECKPOINT and NPROC; --help tells more"
config=$1 checkpoint=$2 processes=$3
shift 3
[[ -f $config ]] || die "no config at $config"
[[ $processes =~ ^[1-9][0-9]*$ ]] || die "NPROC is a number of processes, not $processes"
[[ ${NNODES:-1} == 1 || -n ${MASTER_ADDR-} && -n ${PORT-} ]] ||
  die "several machines need MASTER_ADDR and PORT"

if [[ -z ${PYTHON-}${VIRTUAL_ENV-}${CONDA_PREFIX-} && -x $tools/../.venv/bin/python ]]; then
  PYTHON=$tools/../.venv/bin/python
fi
exec "${PYTHON:-python}" "$tools/torchrun.py" "$processes" \
  "$tools/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
