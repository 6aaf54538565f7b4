#!/usr/bin/env bash
# usage: tools/setup_env.sh [original-mm | original-mm-new-torch | oldest-torch | transformers]
#
# Create or complete an environment in the checkout: .venv with everything that is used here;
# .venv-original-mm with the original OpenMMLab packages and torch 2.1, or the newest;
# .venv-oldest-torch for the tests of the core with the oldest torch that has the fast operations;
# .venv-transformers for those with transformers. pyproject.toml lists the packages of each as a
# dependency group. Nothing is compiled.
# Safe to run at any time. Environment variables:
#   PYTHON=python3.12            the interpreter, 3.10 to 3.13 (default: 3.11, if there is one);
#                                with torch 2.1, 3.9 to 3.11 (default: the oldest)
#   TORCH=cpu                    the build of torch: cpu, a CUDA version such as cu126, auto (the
#                                newest that the GPU's driver supports), or default (that of the
#                                package index). Remembered; a new choice replaces the environment.
set -euo pipefail
{  # read completely before it runs, so that an update of the checkout meanwhile does no harm
cd "$(dirname "$0")/.."
pins=requirements/requirements.txt

fail() { echo "setup: $*" >&2; exit 1; }
py() { "$venv/bin/python" "$@"; }

# The environment: its folder, dependency group, versions of Python, whether the versions of the
# packages are those of the pins, and whether OpenMMLab is in it.
choose_environment() {
  venv=.venv-$1
  group=$1
  pythons="3.11 3.12 3.13 3.10"
  pinned=yes
  has_mm=''
  case $1 in
    "") venv=.venv group=all has_mm=yes ;;
    original-mm) pythons="3.9 3.10 3.11" pinned='' has_mm=yes ;;
    original-mm-new-torch) has_mm=yes ;;
    oldest-torch) pinned='' ;;
    transformers) ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) fail "unknown argument $1; see $0 --help" ;;
  esac
}

check_machine() {
  [ "$(uname -s)" = Linux ] ||
    fail "this works on Linux only (x86-64, or aarch64 with glibc 2.35 or newer), not on $(uname -s);" \
      "elsewhere, pip install '.[torch]' installs the backbones, and '.[mm]' OpenMMLab, too"
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

# Nothing to do if none of these files has changed. They are read once, at the start.
record_inputs() {
  inputs=$(
    {
      cat "$pins" requirements/overrides.txt tools/setup_env.sh
      sed '/^\[tool.ruff\]/,$d' pyproject.toml # without the settings of development tools
      echo "$torch"
    } | sha256sum
  )
}

up_to_date() {
  [ "$(cat "$venv/complete" 2>/dev/null)" = "$inputs" ] && py -c '' 2>/dev/null
}

# One set-up of an environment at a time. A second one finds done what it waited for.
lock_environment() {
  exec 9>"$venv.lock"
  flock -n 9 && return
  echo "setup: waiting for another set-up of $venv"
  flock 9
  if up_to_date; then exit 0; fi
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

# Install the packages of the group, in the versions of the pins if the environment keeps to them.
# mmcv is built as every package without a wheel is, apart from the environment: without operators.
install_packages() {
  local options=(--override requirements/overrides.txt --compile-bytecode) left_out='^$'
  if [ "$torch" != default ]; then
    options+=(--torch-backend "$torch")
    left_out='^(nvidia-|cuda-|triton)' # each build of torch depends on its own versions of these
  fi
  if [ -n "$pinned" ]; then
    uv_install "${options[@]}" --constraint <(grep -vE "$left_out" "$pins") --group "$group"
  else
    uv_install "${options[@]}" --group "$group"
  fi || fail "cannot install the packages with TORCH=$torch"
  uv_install --no-deps --editable .
  echo "$torch" >"$venv/torch"
}

choose_environment "${1:-}"
check_machine
choose_torch
record_inputs
if up_to_date; then exit 0; fi
choose_python
lock_environment
echo "setup: installing packages into $venv"
create_environment
install_packages
if [ -n "$has_mm" ]; then py -m cpvt_pyramid.app.doctor || true; fi
printf '%s\n' "$inputs" >"$venv/complete"
echo "setup: complete"
exit
}
