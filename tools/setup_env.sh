#!/usr/bin/env bash
# usage: tools/setup_env.sh [packages | original-mm | original-mm-new-torch | oldest-torch |
#                            transformers]
#
# Create or complete an environment in the checkout: .venv with everything that is used here, or
# with `packages` all but mmcv, whose operators must be compiled; .venv-original-mm with the original
# OpenMMLab packages and torch 2.1, or the newest; .venv-oldest-torch for the tests of the core with
# the oldest torch that has the fast operations; .venv-transformers for those with transformers.
# Safe to run at any time. Environment variables:
#   PYTHON=python3.12            the interpreter, 3.10 to 3.13 (default: 3.11, if there is one);
#                                with torch 2.1, 3.9 to 3.11 (default: the oldest)
#   TORCH=cpu                    the build of torch: cpu, a CUDA version such as cu126, auto (the
#                                newest that the GPU's driver supports), or default (that of the
#                                package index). Remembered; a new choice replaces the environment.
#   FORCE_CUDA=1                 compile mmcv's operators for CUDA on a machine without a GPU, for
#                                the architectures in TORCH_CUDA_ARCH_LIST
#   MMCV_WHEEL=path/to/mmcv.whl  use this wheel instead of compiling mmcv's operators
#   CPVT_WHEEL_CACHE=folder      keep compiled wheels here (default ~/.cache/cpvt_pyramid)
set -euo pipefail
{  # read completely before it runs, so that an update of the checkout meanwhile does no harm
cd "$(dirname "$0")/.."

fail() { echo "setup: $*" >&2; exit 1; }
py() { "$venv/bin/python" "$@"; }

constraints=/dev/null
pythons="3.11 3.12 3.13 3.10"
stamp_file=complete
case "${1:-}" in
  "") venv=.venv requirements=(requirements/requirements.txt requirements/mmcv.txt) ;;
  packages)
    venv=.venv requirements=(requirements/requirements.txt)
    stamp_file=packages
    ;;
  original-mm) venv=.venv-$1 requirements=(requirements/$1.txt) pythons="3.9 3.10 3.11" ;;
  original-mm-new-torch)
    venv=.venv-$1 requirements=(requirements/$1.txt)
    constraints=requirements/requirements.txt
    ;;
  oldest-torch) venv=.venv-oldest-torch requirements=(requirements/oldest-torch.txt) ;;
  transformers)
    venv=.venv-transformers requirements=(requirements/transformers.txt)
    constraints=requirements/requirements.txt
    ;;
  -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
  *) fail "unknown argument $1; see $0 --help" ;;
esac

[ "$(uname -s)" = Linux ] ||
  fail "this works on Linux only (x86-64, or aarch64 with glibc 2.35 or newer), not on $(uname -s);" \
    "elsewhere, pip install '.[torch]' installs the backbones"

cache=${CPVT_WHEEL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cpvt_pyramid}
present=$(cat "$venv/torch" 2>/dev/null || echo default)
torch=${TORCH:-$present}
[[ $torch =~ ^(default|auto|cpu|cu[0-9]+)$ ]] ||
  fail "TORCH must be cpu, a CUDA version such as cu126, auto or default, got $torch"

mmcv=$(cat "${requirements[@]}" | grep -E '^(onedl-)?mmcv==' || true)

# Nothing to do if neither these files nor what the operators are compiled for have changed.
packages_from() {
  cat "${requirements[0]}" "$constraints" requirements/overrides.txt tools/setup_env.sh pyproject.toml
  echo "$torch"
}
operators_from() {
  echo "$mmcv"
  echo "${FORCE_CUDA:-} ${TORCH_CUDA_ARCH_LIST:-} ${CUDA_HOME:-} ${CUDA_VISIBLE_DEVICES--}"
  command -v nvcc || true
  nvidia-smi -L 2>/dev/null | sed 's/(UUID.*//' || ls /dev/nvidia[0-9]* 2>/dev/null || true
}
packages_stamp=$(packages_from | sha256sum)
if [ -n "$mmcv" ]; then
  stamp=$({ packages_from; operators_from; } | sha256sum)
else
  stamp=$packages_stamp
fi
up_to_date() {
  [ "$(cat "$venv/$stamp_file" 2>/dev/null)" = "$stamp" ] && py -c '' 2>/dev/null
}
if [ -z "${MMCV_WHEEL:-}" ] && up_to_date; then
  exit 0
fi

# The first of these versions that runs, on the PATH or in pyenv.
find_python() {
  local version path
  for version in $pythons; do
    for path in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
      "$path" -c '' 2>/dev/null && echo "$path" && return
    done
  done
  true
}
python=${PYTHON:-$(find_python)}
wanted="set PYTHON=... to a Python of ${pythons// /, }"
command -v "$python" >/dev/null || fail "${python:-python} not found; $wanted"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ " $pythons " == *" $version "* ]] || fail "$python is Python $version; $wanted"
[ -z "$mmcv" ] || [ -n "${MMCV_WHEEL:-}" ] || command -v g++ >/dev/null ||
  fail "g++ not found; install a C++ compiler for mmcv's operators, or set MMCV_WHEEL=... to a wheel"

# One set-up of an environment at a time. A second one waits until it finds what it would do done:
# `packages` does not wait for the operators.
exec 9>"$venv.lock"
if ! flock -n 9; then
  echo "setup: waiting for another set-up of $venv"
  until flock --timeout 1 9; do
    if up_to_date; then exit 0; fi
  done
fi

if [ -e "$venv" ] && [ "$torch" != "$present" ]; then
  # An installed torch of any build satisfies the requirement, and would stay.
  echo "setup: replacing $venv, in which torch is '$present'"
  rm -rf "$venv"
fi
echo "setup: installing packages into $venv"
# Replace an incomplete environment, or one whose interpreter is gone.
py -m uv --version >/dev/null 2>&1 || {
  rm -rf "$venv"
  "$python" -m venv "$venv"
  py -m pip install --quiet --disable-pip-version-check \
    "$(grep -o '^uv==[^ ]*' requirements/requirements.txt)"
}
install() { py -m uv pip install --quiet --python "$venv/bin/python" "$@"; }

backend=() left_out='^(onedl-)?mmcv=='
if [ "$torch" != default ]; then
  backend=(--torch-backend "$torch")
  left_out+='|^(nvidia-|cuda-|triton)' # each build of torch depends on its own versions of these
fi
pins() { grep -vE "$left_out" "$1" || true; }
install "${backend[@]}" --compile-bytecode --override requirements/overrides.txt \
  --constraint <(pins "$constraints") -r <(pins "${requirements[0]}") ||
  fail "cannot install the packages with TORCH=$torch"
echo "$torch" >"$venv/torch"
install --no-deps --editable .
printf '%s\n' "$packages_stamp" >"$venv/packages"

install_wheel() { install --no-deps --reinstall "$1"; }
# For CUDA, on this machine's GPU if there is one. A build for CUDA also works without one.
operators_work() {
  py - "$mmcv" "$built_for" 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version
import torch
from mmcv.ops import get_compiling_cuda_version, nms

(name, pinned), built_for = sys.argv[1].split('=='), sys.argv[2]
assert version(name) == pinned
if not built_for.endswith('-cpu'):
    assert get_compiling_cuda_version() != 'not available'
    if torch.cuda.is_available():
        nms(torch.ones(1, 4).cuda(), torch.ones(1).cuda(), 0.5)
PYTHON
}

# torch, Python and the device: what the compiled code depends on.
built_for=$([ -z "$mmcv" ] || py - <<'PYTHON'
import sys
from cpvt_pyramid.doctor import mmcv_built_for
try:
    print(mmcv_built_for())
except ValueError as error:
    sys.exit(f'setup: {error}')
PYTHON
)
if [ -n "${MMCV_WHEEL:-}" ]; then
  [ -f "$MMCV_WHEEL" ] || fail "no file at MMCV_WHEEL=$MMCV_WHEEL"
  install_wheel "$MMCV_WHEEL"
  operators_work || fail "the operators in $MMCV_WHEEL do not work with $built_for; unset MMCV_WHEEL to compile them"
elif [ -n "$mmcv" ] && ! operators_work; then
  folder=$cache/${mmcv/==/-}-$built_for
  mkdir -p "$folder"
  exec 8>"$folder/lock"
  flock -n 8 || { echo "setup: waiting for another set-up to compile mmcv"; flock 8; }
  wheel() { find "$folder" -maxdepth 1 -name "*_$(uname -m).whl" -print -quit; }
  if [ -z "$(wheel)" ]; then
    echo "setup: compiling mmcv's operators, only this once (for a CPU 4 to 10 minutes on 2 cores; log: $folder/build.log)"
    # The sources are kept until the wheel is complete, so that an interrupted build can continue.
    if [ ! -d "$folder/source" ]; then
      rm -rf "$folder/download"
      py -m pip download --quiet --disable-pip-version-check --no-deps \
        --no-build-isolation --no-binary :all: --dest "$folder/download" "$mmcv"
      mkdir "$folder/download/source"
      tar -xzf "$folder"/download/*.tar.gz -C "$folder/download/source" --strip-components 1
      mv "$folder/download/source" "$folder/source"
    fi
    # An isolated build finds no torch and silently leaves out the operators. mmcv compiles for
    # any GPU that torch sees, even without nvcc. Python adds -g, which takes half of the time.
    {
      [[ $built_for != *-cpu ]] || export CUDA_VISIBLE_DEVICES=
      export CFLAGS="-g0 ${CFLAGS:-}"
      PATH=$PWD/$venv/bin:$PATH MMCV_WITH_OPS=1 MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        py -m pip wheel -v --disable-pip-version-check --no-deps --no-build-isolation \
        --wheel-dir "$folder/built" "$folder/source" 2>&1
    } |
      tee "$folder/build.log" | grep --line-buffered -oE '\[[0-9]+/[0-9]+\]' ||
      fail "cannot compile mmcv; see $folder/build.log"
    mv "$folder"/built/*.whl "$folder"/
    rm -rf "$folder/built" "$folder/source" "$folder/download"
  fi
  install_wheel "$(wheel)"
  operators_work || fail "mmcv's operators do not work; remove $folder and run again"
  exec 8>&-
fi

# What torch and mmcv were built for, and whether they can use this machine's GPU.
rows=(device)
[ -z "$mmcv" ] || rows+=('mmcv operators')
py -m cpvt_pyramid.doctor "${rows[@]}" || true
printf '%s\n' "$stamp" >"$venv/$stamp_file"
echo "setup: complete"
exit
}
