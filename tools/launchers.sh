# shellcheck shell=bash
# Sourced by dist_train.sh, dist_test.sh and slurm_train.sh after they define `usage`.
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
die() { echo "${0##*/}: $*" >&2; exit 2; }
check_config() { [[ -f $1 ]] || die "no config at $1"; }

# NPROC ARGUMENT...: replace this shell by torchrun with NPROC processes
torchrun() {
  [[ $1 =~ ^[1-9][0-9]*$ ]] || die "NPROC must be a number of processes, got $1"
  [[ ${NNODES:-1} == 1 || -n ${MASTER_ADDR-} && -n ${PORT-} ]] ||
    die "several machines need MASTER_ADDR and PORT"
  command -v "$PYTHON" > /dev/null || die "$PYTHON not found; run 'make setup', or set PYTHON"
  exec "$PYTHON" "$tools/torchrun.py" "$@"
}

if [[ " $* " =~ " -h "|" --help " ]]; then usage; exit; fi
# An environment that the user activated, then .venv, then what is on the path. Conda activates its
# base environment in every shell.
if [[ -z ${PYTHON-}${VIRTUAL_ENV-} && ${CONDA_DEFAULT_ENV:-base} == base &&
  -x $tools/../.venv/bin/python ]]; then
  PYTHON=$tools/../.venv/bin/python
fi
: "${PYTHON:=python}"
