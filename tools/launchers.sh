# shellcheck shell=bash
# Sourced by dist_*.sh and slurm_*.sh after they define `usage`.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  echo "launchers.sh: nothing to run; it is part of dist_*.sh and slurm_*.sh" >&2
  exit 2
fi
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
die() { echo "${0##*/}: $*" >&2; exit 2; }
check_config() { [[ -f $1 ]] || die "no config at $1"; }

# NPROC: check the number of processes, and that there is an interpreter
check_processes() {
  [[ $1 =~ ^[1-9][0-9]*$ ]] || die "NPROC must be a number of processes, got $1"
  command -v "$PYTHON" > /dev/null || die "$PYTHON not found; run 'make setup', or set PYTHON"
}

# In a Slurm step on several machines, with a task on each: number and index of the machine, and where
# the first one listens
nodes_of_slurm() {
  [[ -z ${NNODES-} && ${SLURM_STEP_NUM_NODES:-1} != 1 ]] || return 0
  export NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID
  [[ -n ${MASTER_ADDR-} ]] ||
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
  export MASTER_ADDR PORT=${PORT:-$(( 20000 + SLURM_JOB_ID % 20000 ))}
}

# NPROC ARGUMENT...: replace this shell by torchrun with NPROC processes
torchrun() {
  check_processes "$1"
  nodes_of_slurm
  [[ ${NNODES:-1} == 1 || -n ${MASTER_ADDR-} && -n ${PORT-} ]] ||
    die "several machines need MASTER_ADDR and PORT"
  local processes=$1 meeting=(--standalone) # on a free port
  shift
  if [[ ${NNODES:-1} != 1 || -n ${PORT-} ]]; then
    meeting=(--nnodes="${NNODES:-1}" --node-rank="${NODE_RANK:-0}")
    meeting+=(--master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="$PORT")
  fi
  share_cores "$processes"
  # As the option --signals-to-handle, which older versions of PyTorch do not have: with it, torchrun
  # passes SIGUSR1 on, too.
  export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
  exec "$PYTHON" -m torch.distributed.run "${meeting[@]}" --nproc-per-node="$processes" "$@"
}

# NPROC: let the processes divide the cores
share_cores() {
  local threads=$(( $(nproc) / $1 ))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( threads > 0 ? threads : 1 ))}
}

# NPROC COMMAND...: run a tool that shares its work through files in NPROC processes. If one ends,
# the others go on; where one finishes the work, its exit status counts.
share() {
  check_processes "$1"
  nodes_of_slurm
  local processes=$1 status result pids=() i
  shift
  export WORLD_SIZE=$(( ${NNODES:-1} * processes ))
  share_cores "$processes"
  trap 'kill "${pids[@]}" 2> /dev/null' INT TERM
  for (( i = 0; i < processes; i++ )); do
    # No progress bars: they would write over each other.
    RANK=$(( ${NODE_RANK:-0} * processes + i )) LOCAL_RANK=$i \
      "$PYTHON" "$@" --launcher pytorch 2> >(cat >&2) &
    pids+=($!)
  done
  for i in "${pids[@]}"; do
    # A signal to this shell ends a wait.
    while wait "$i" 2> /dev/null; result=$?; kill -0 "$i" 2> /dev/null; do :; done
    if (( result <= 1 )); then
      status=$(( result < ${status-2} ? result : status ))
    else
      echo "${0##*/}: a process ended with exit status $result" >&2
    fi
  done
  exit "${status-$result}"
}

# PARTITION JOB SRUN_OPTION... -- COMMAND...: replace this shell by srun with one task per GPU
slurm() {
  command -v srun > /dev/null || die "srun not found; run this on a Slurm cluster"
  local gpus=${GPUS:-8} per_node=${GPUS_PER_NODE:-8} options=(--partition="$1" --job-name="$2")
  [[ $gpus =~ ^[1-9][0-9]*$ && $per_node =~ ^[1-9][0-9]*$ ]] ||
    die "GPUS and GPUS_PER_NODE must be numbers, got $gpus and $per_node"
  (( per_node <= gpus )) || per_node=$gpus
  shift 2
  options+=(--gres="gpu:$per_node" --ntasks="$gpus" --ntasks-per-node="$per_node")
  options+=(--cpus-per-task="${CPUS_PER_TASK:-5}")
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  shift
  # SRUN_ARGS is several words.
  # shellcheck disable=SC2086
  exec srun "${options[@]}" ${SRUN_ARGS-} "$PYTHON" -u "$@" --launcher slurm
}

if [[ " $* " =~ " -h "|" --help " ]]; then usage; exit; fi
# An environment that the user activated, then .venv, then what is on the path. Conda activates its
# base environment in every shell.
if [[ -z ${PYTHON-}${VIRTUAL_ENV-} && ${CONDA_DEFAULT_ENV:-base} == base &&
  -x $tools/../.venv/bin/python ]]; then
  PYTHON=$tools/../.venv/bin/python
fi
: "${PYTHON:=python}"
