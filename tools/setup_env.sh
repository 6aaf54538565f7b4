#!/usr/bin/env bash
# usage: tools/setup_env.sh [packages | original-mm | original-mm-new-torch | oldest-torch |
#                            transformers]
#
# Create or complete an environment in the checkout: .venv with everything that is used here, or
# with `packages` all but mmcv, whose operators must be compiled; .venv-original-mm with the original
# OpenMMLab packages and torch 2.1, or the newest; .venv-oldest-torch for the tests of the core with
# the oldest torch that has the fast operations; .venv-transformers for those with transformers.
# pyproject.toml lists the packages of each as a dependency group.
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
pins=requirements/requirements.txt

fail() { echo "setup: $*" >&2; exit 1; }
py() { "$venv/bin/python" "$@"; }

# The environment: its folder, dependency group, mmcv, versions of Python, whether the versions of
# the packages are those of the pins, and the file that is written last.
choose_environment() {
  venv=.venv-$1
  group=$1
  mmcv=''
  pythons="3.11 3.12 3.13 3.10"
  pinned=yes
  stamp=complete
  case $1 in
    "") venv=.venv group=all mmcv=onedl-mmcv==2.3.6 ;;
    packages) venv=.venv group=all stamp=packages ;;
    original-mm) mmcv=mmcv==2.1.0 pythons="3.9 3.10 3.11" pinned='' ;;
    original-mm-new-torch) mmcv=mmcv==2.1.0 ;;
    oldest-torch) pinned='' ;;
    transformers) ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) fail "unknown argument $1; see $0 --help" ;;
  esac
}

check_machine() {
  [ "$(uname -s)" = Linux ] ||
    fail "this works on Linux only (x86-64, or aarch64 with glibc 2.35 or newer), not on $(uname -s);" \
      "elsewhere, pip install '.[torch]' installs the backbones"
  [ -z "$mmcv" ] || [ -n "${MMCV_WHEEL:-}" ] || command -v g++ >/dev/null ||
    fail "g++ not found; install a C++ compiler for mmcv's operators, or set MMCV_WHEEL=... to a wheel"
  [ -z "${MMCV_WHEEL:-}" ] || [ -f "$MMCV_WHEEL" ] || fail "no file at MMCV_WHEEL=$MMCV_WHEEL"
}

choose_torch() {
  present=$(cat "$venv/torch" 2>/dev/null || echo default)
  torch=${TORCH:-$present}
  [[ $torch =~ ^(default|auto|cpu|cu[0-9]+)$ ]] ||
    fail "TORCH must be cpu, a CUDA version such as cu126, auto or default, got $torch"
}

# Print the first of the versions that runs, on the PATH or in pyenv.
find_python() {
  local version path
  for version in $pythons; do
    for path in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
      "$path" -c '' 2>/dev/null && echo "$path" && return
    done
  done
  true
}

choose_python() {
  local version wanted="set PYTHON=... to a Python of ${pythons// /, }"
  python=${PYTHON:-$(find_python)}
  command -v "$python" >/dev/null || fail "${python:-python} not found; $wanted"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [[ " $pythons " == *" $version "* ]] || fail "$python is Python $version; $wanted"
}

# Nothing to do if neither these files nor what the operators are compiled for have changed. They
# are read once, at the start.
record_inputs() {
  local packages operators
  packages=$(
    cat "$pins" requirements/overrides.txt tools/setup_env.sh
    sed '/^\[tool.ruff\]/,$d' pyproject.toml # without the settings of development tools
    echo "$torch"
  )
  operators=$(
    echo "$mmcv ${FORCE_CUDA:-} ${TORCH_CUDA_ARCH_LIST:-} ${CUDA_HOME:-} ${CUDA_VISIBLE_DEVICES--}"
    command -v nvcc || true
    nvidia-smi -L 2>/dev/null | sed 's/(UUID.*//' || ls /dev/nvidia[0-9]* 2>/dev/null || true
  )
  packages_inputs=$(sha256sum <<<"$packages")
  inputs=$packages_inputs
  [ -z "$mmcv" ] || inputs=$(sha256sum <<<"$packages$operators")
}

up_to_date() {
  [ "$(cat "$venv/$stamp" 2>/dev/null)" = "$inputs" ] && py -c '' 2>/dev/null
}

# One set-up of an environment at a time. A second one waits until it finds what it would do done:
# `packages` does not wait for the operators.
lock_environment() {
  exec 9>"$venv.lock"
  flock -n 9 && return
  echo "setup: waiting for another set-up of $venv"
  until flock --timeout 1 9; do
    if up_to_date; then exit 0; fi
  done
}

# Replace an incomplete environment, one whose interpreter is gone, and one with another build of
# torch, which would satisfy the requirement and stay.
create_environment() {
  if [ -e "$venv" ] && [ "$torch" != "$present" ]; then
    echo "setup: replacing $venv, in which torch is '$present'"
    rm -rf "$venv"
  fi
  py -m uv --version >/dev/null 2>&1 && return
  rm -rf "$venv"
  "$python" -m venv "$venv"
  py -m pip install --quiet --disable-pip-version-check "$(grep -o '^uv==[^ ]*' "$pins")"
}

uv_install() { py -m uv pip install --quiet --python "$venv/bin/python" "$@"; }

# Install packages of the group in the versions of the pins, if the environment keeps to them.
install() {
  local options=(--override requirements/overrides.txt) left_out='^$'
  if [ "$torch" != default ]; then
    options+=(--torch-backend "$torch")
    left_out='^(nvidia-|cuda-|triton)' # each build of torch depends on its own versions of these
  fi
  if [ -n "$pinned" ]; then
    uv_install "${options[@]}" --constraint <(grep -vE "$left_out" "$pins") "$@"
  else
    uv_install "${options[@]}" "$@"
  fi || fail "cannot install the packages with TORCH=$torch"
  echo "$torch" >"$venv/torch"
}

install_packages() {
  install --compile-bytecode --group "$group"
  uv_install --no-deps --editable .
  printf '%s\n' "$packages_inputs" >"$venv/packages"
}

# Set the folder of the cache with the operators for this torch, Python and device.
choose_wheel_folder() {
  built_for=$(py tools/mmcv_build.py)
  local caches=$HOME/.cache
  case ${XDG_CACHE_HOME:-} in /*) caches=$XDG_CACHE_HOME ;; esac  # as in cpvt_pyramid/caches.py
  wheels=${CPVT_WHEEL_CACHE:-$caches/cpvt_pyramid}/${mmcv/==/-}-$built_for
}

compiled_wheel() { find "$wheels" -maxdepth 1 -name "*_$(uname -m).whl" -print -quit; }

# The sources are kept until the wheel is complete, so that an interrupted build can continue.
download_source() {
  [ ! -d "$wheels/source" ] || return 0
  rm -rf "$wheels/download"
  py -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --no-binary :all: --dest "$wheels/download" "$mmcv"
  mkdir "$wheels/download/source"
  tar -xzf "$wheels"/download/*.tar.gz -C "$wheels/download/source" --strip-components 1
  mv "$wheels/download/source" "$wheels/source"
}

# An isolated build finds no torch and silently leaves out the operators. mmcv compiles for any GPU
# that torch sees, even without nvcc. Python adds -g, which takes half of the time.
build_wheel() {
  [[ $built_for != *-cpu ]] || export CUDA_VISIBLE_DEVICES=
  PATH=$PWD/$venv/bin:$PATH CFLAGS="-g0 ${CFLAGS:-}" MMCV_WITH_OPS=1 MAX_JOBS=${MAX_JOBS:-$(nproc)} \
    py -m pip wheel -v --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir "$wheels/built" "$wheels/source" 2>&1
}

# Add a wheel of mmcv to the cache, unless it has one.
compile_mmcv() {
  mkdir -p "$wheels"
  exec 8>"$wheels/lock"
  flock -n 8 || { echo "setup: waiting for another set-up to compile mmcv"; flock 8; }
  [ -z "$(compiled_wheel)" ] || return 0
  echo "setup: compiling mmcv's operators, only this once (for a CPU 4 to 10 minutes on 2 cores; log: $wheels/build.log)"
  download_source
  (build_wheel) | tee "$wheels/build.log" | grep --line-buffered -oE '\[[0-9]+/[0-9]+\]' ||
    fail "cannot compile mmcv; see $wheels/build.log"
  mv "$wheels"/built/*.whl "$wheels"/
  rm -rf "$wheels/built" "$wheels/source" "$wheels/download"
}

# Install torch and what else mmcv is compiled with, and start compiling, while the other packages
# are downloaded. The job is a process group of its own; it ends with this script.
start_compiling() {
  install --group compiling --group newest-torch
  choose_wheel_folder
  if operators_work; then return; fi
  set -m
  compile_mmcv </dev/null &
  compiling=$!
  set +m
  trap 'kill -- "-$compiling" 2>/dev/null' EXIT
}

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

install_wheel() { uv_install --no-deps --reinstall "$1"; }

install_mmcv() {
  choose_wheel_folder
  if [ -n "${MMCV_WHEEL:-}" ]; then
    install_wheel "$MMCV_WHEEL"
    operators_work ||
      fail "the operators in $MMCV_WHEEL do not work with $built_for; unset MMCV_WHEEL to compile them"
    return
  fi
  if [ -n "$compiling" ]; then
    wait "$compiling" || exit 1
    trap - EXIT
  fi
  if operators_work; then return; fi
  (compile_mmcv)
  install_wheel "$(compiled_wheel)"
  operators_work || fail "mmcv's operators do not work; remove $wheels and run again"
}

choose_environment "${1:-}"
check_machine
choose_torch
record_inputs
if [ -z "${MMCV_WHEEL:-}" ] && up_to_date; then exit 0; fi
choose_python
lock_environment
echo "setup: installing packages into $venv"
create_environment
compiling=''
if [ "$group" = all ] && [ -n "$mmcv" ] && [ -z "${MMCV_WHEEL:-}" ]; then start_compiling; fi
install_packages
if [ -n "$mmcv" ]; then install_mmcv; fi
if [ -n "$mmcv" ]; then py -m cpvt_pyramid.app.doctor || true; fi
printf '%s\n' "$inputs" >"$venv/$stamp"
echo "setup: complete"
exit
}
