#!/usr/bin/env bash
# Train on a Slurm cluster with one task per GPU.
usage() {
  cat <<'USAGE'
usage: slurm_train.sh PARTITION JOB_NAME CONFIG [OPTION OF train.py ...]

Environment variables:
  GPUS=8, GPUS_PER_NODE=8    GPUs of the job, and of each machine
  CPUS_PER_TASK=5            CPUs per GPU
  SRUN_ARGS                  further options for srun, for example "--time=2-0 --qos=high"
  PYTHON                     the interpreter; by default that of the active environment, or .venv's
USAGE
}
# shellcheck source=tools/launchers.sh
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 3 )) || die "needs PARTITION, JOB_NAME and CONFIG; see --help"
partition=$1 job=$2 config=$3
shift 3
check_config "$config"
command -v srun > /dev/null || die "srun not found; run this on a Slurm cluster"
gpus=${GPUS:-8} per_node=${GPUS_PER_NODE:-8}
[[ $gpus =~ ^[1-9][0-9]*$ && $per_node =~ ^[1-9][0-9]*$ ]] ||
  die "GPUS and GPUS_PER_NODE must be numbers, got $gpus and $per_node"
(( per_node <= gpus )) || per_node=$gpus

# SRUN_ARGS is several words.
# shellcheck disable=SC2086
exec srun --partition="$partition" --job-name="$job" --gres="gpu:$per_node" \
  --ntasks="$gpus" --ntasks-per-node="$per_node" --cpus-per-task="${CPUS_PER_TASK:-5}" \
  --kill-on-bad-exit=1 ${SRUN_ARGS-} \
  "$PYTHON" -u "$tools/train.py" "$config" --launcher slurm "$@"
