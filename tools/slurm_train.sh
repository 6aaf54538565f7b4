#!/usr/bin/env bash
# Train on a Slurm cluster, one task to a GPU.
usage() {
  cat <<'USAGE'
usage: slurm_train.sh PARTITION JOB_NAME CONFIG [OPTION OF train.py ...]

Environment variables:
  GPUS=8, GPUS_PER_NODE=8    of the whole job, and of a machine (at most GPUS)
  CPUS_PER_TASK=5            of each GPU
  SRUN_ARGS                  more options of srun, for example "--time=2-0 --qos=high"
  PYTHON                     the interpreter: python, or .venv's where no environment is active
USAGE
}
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 3 )) || die "needs PARTITION, JOB_NAME and CONFIG; --help tells more"
partition=$1 job=$2 config=$3
shift 3
check_config "$config"
command -v srun > /dev/null || die "no srun here; is this a machine of a Slurm cluster?"
gpus=${GPUS:-8} per_node=${GPUS_PER_NODE:-8}
[[ $gpus =~ ^[1-9][0-9]*$ && $per_node =~ ^[1-9][0-9]*$ ]] ||
  die "GPUS and GPUS_PER_NODE are numbers, not $gpus and $per_node"
(( per_node <= gpus )) || per_node=$gpus

# SRUN_ARGS is several words.
# shellcheck disable=SC2086
exec srun --partition="$partition" --job-name="$job" --gres="gpu:$per_node" \
  --ntasks="$gpus" --ntasks-per-node="$per_node" --cpus-per-task="${CPUS_PER_TASK:-5}" \
  --kill-on-bad-exit=1 ${SRUN_ARGS-} \
  "$PYTHON" -u "$tools/train.py" "$config" --launcher slurm "$@"
