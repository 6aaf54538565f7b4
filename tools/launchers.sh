# shellcheck shell=bash
# What dist_train.sh, dist_test.sh and slurm_train.sh have in common; each sources it after `usage`.
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
die() { echo "${0##*/}: $*" >&2; exit 2; }
check_config() { [[ -f $1 ]] || die "no config at $1"; }

# NPROC ARGUMENT...: go on as torchrun with so many processes
torchrun() {
  [[ $1 =~ ^[1-9][0-9]*$ ]] || die "NPROC is a number of processes, not $1"
  [[ ${NNODES:-1} == 1 || -n ${MASTER_ADDR-} && -n ${PORT-} ]] ||
    die "several machines need MASTER_ADDR and PORT"
  exec "$PYTHON" "$tools/torchrun.py" "$@"
}

if [[ " $* " =~ " -h "|" --help " ]]; then usage; exit; fi
if [[ -z ${PYTHON-}${VIRTUAL_ENV-}${CONDA_PREFIX-} && -x $tools/../.venv/bin/python ]]; then
  PYTHON=$tools/../.venv/bin/python
fi
: "${PYTHON:=python}"
