#!/usr/bin/env bash
# Run a model on images with several processes: one per GPU or, without GPUs, on the CPU.
usage() {
  cat <<'USAGE'
usage: dist_infer.sh NPROC CONFIG CHECKPOINT INPUT... [OPTION OF infer.py ...]
       dist_infer.sh NPROC MODEL.onnx INPUT... [OPTION OF infer.py ...]

NPROC processes on this machine share the images and, with --tile, the rows of tiles. If one is
killed, the others do its work; if all are, the same command resumes. Several machines need a common
folder for the results, and run the same command. Environment variables:
  NNODES=1, NODE_RANK=0    number of machines, and index of this one; in a Slurm step with a task
                           on each machine, those of Slurm
  OMP_NUM_THREADS          threads of each process; by default the processes share the cores
  PYTHON                   the interpreter; by default that of the active environment, or .venv's
USAGE
}
# shellcheck source=tools/launchers.sh
source "$(dirname "${BASH_SOURCE[0]}")/launchers.sh"

(( $# >= 3 )) || die "needs NPROC, a model and inputs; see --help"
processes=$1
shift
share "$processes" "$tools/infer.py" "$@"
