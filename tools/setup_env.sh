#!/usr/bin/env bash
# Create or complete the environment .venv in the checkout. Safe to run at any time.
#
#   PYTHON=python3.11            the interpreter for .venv
#   MMCV_WHEEL=path/to/mmcv.whl  use this wheel instead of compiling mmcv's operators
#   CPVT_WHEEL_CACHE=folder      keep the compiled wheel here (default ~/.cache/cpvt_pyramid)
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "setup: $*" >&2; exit 1; }

case "${1:-}" in
  "") ;;
  -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) fail "unknown argument $1; see $0 --help" ;;
esac

python=${PYTHON:-python3.11}
cache=${CPVT_WHEEL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cpvt_pyramid}

# Nothing to do if these files have not changed.
stamp=$(cat requirements/*.txt tools/setup_env.sh setup.py | sha256sum)
if [ "$(cat .venv/complete 2>/dev/null)" = "$stamp" ] && [ -z "${MMCV_WHEEL:-}" ]; then
  .venv/bin/python -c '' 2>/dev/null && exit 0
fi

command -v "$python" >/dev/null || fail "$python not found; set PYTHON=... to a Python 3.11"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || fail "$python is Python $version; set PYTHON=... to a Python 3.11"
command -v g++ >/dev/null || [ -n "${MMCV_WHEEL:-}" ] ||
  fail "g++ not found; install a C++ compiler for mmcv's operators, or set MMCV_WHEEL=... to a wheel"

# One set-up at a time; a second one waits.
exec 9>.setup.lock
if ! flock -n 9; then
  echo "setup: waiting for another set-up of this checkout"
  flock 9
fi

echo "setup: installing packages"
# Replace an incomplete .venv, or one whose interpreter is gone.
.venv/bin/python -m uv --version >/dev/null 2>&1 || {
  rm -rf .venv
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    "$(grep -o '^uv==[^ ]*' requirements/requirements.txt)"
}
.venv/bin/python -m uv pip install --quiet --no-deps --compile-bytecode --python .venv/bin/python -r requirements/requirements.txt

install_wheel() {
  .venv/bin/python -m uv pip install --quiet --python .venv/bin/python --no-deps --reinstall "$1"
}
operators_load() { .venv/bin/python -c 'import mmcv.ops' 2>/dev/null; }

mmcv=$(grep -v '^#' requirements/mmcv.txt)
if [ -n "${MMCV_WHEEL:-}" ]; then
  [ -f "$MMCV_WHEEL" ] || fail "no file at MMCV_WHEEL=$MMCV_WHEEL"
  install_wheel "$MMCV_WHEEL"
  operators_load || fail "the operators in $MMCV_WHEEL do not load with this torch and Python; unset MMCV_WHEEL to compile them"
elif ! .venv/bin/python -c "from importlib.metadata import version; assert version('${mmcv%==*}') == '${mmcv#*==}'" 2>/dev/null || ! operators_load; then
  # The compiled code depends on mmcv, torch, Python and the kind of device.
  tag=$(.venv/bin/python - <<'EOF'
import sys, torch
from torch.utils.cpp_extension import CUDA_HOME
device = 'cuda' if torch.cuda.is_available() and CUDA_HOME else 'cpu'
print(f'torch{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}-{device}')
EOF
  )
  # Without nvcc, hide the GPU, so that mmcv is compiled for the CPU only.
  [[ $tag == *-cuda ]] || export CUDA_VISIBLE_DEVICES=
  folder=$cache/${mmcv/==/-}-$tag
  mkdir -p "$folder"
  exec 8>"$folder/lock"
  flock -n 8 || { echo "setup: waiting for another set-up to compile mmcv"; flock 8; }
  wheel=$(find "$folder" -maxdepth 1 -name "*.whl" -print -quit)
  if [ -z "$wheel" ]; then
    echo "setup: compiling mmcv's operators, only this once (15 to 30 minutes on 2 cores; log: $folder/build.log)"
    # The sources are kept until the wheel is complete, so that an interrupted build can continue.
    if [ ! -d "$folder/source" ]; then
      rm -rf "$folder/download"
      .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
        --no-build-isolation --no-binary :all: --dest "$folder/download" "$mmcv"
      mkdir "$folder/download/source"
      tar -xzf "$folder"/download/*.tar.gz -C "$folder/download/source" --strip-components 1
      mv "$folder/download/source" "$folder/source"
    fi
    # An isolated build finds no torch and silently leaves out the operators.
    PATH=$PWD/.venv/bin:$PATH MMCV_WITH_OPS=1 MAX_JOBS=${MAX_JOBS:-$(nproc)} \
      .venv/bin/python -m pip wheel -v --disable-pip-version-check --no-deps --no-build-isolation \
      --wheel-dir "$folder/built" "$folder/source" 2>&1 |
      tee "$folder/build.log" | grep --line-buffered -oE '\[[0-9]+/[0-9]+\]' ||
      fail "cannot compile mmcv; see $folder/build.log"
    mv "$folder"/built/*.whl "$folder"/
    rm -rf "$folder/built" "$folder/source" "$folder/download"
    wheel=$(find "$folder" -maxdepth 1 -name "*.whl" -print -quit)
  fi
  install_wheel "$wheel"
  operators_load || fail "mmcv's operators do not load; remove $folder and run again"
  exec 8>&-
fi

.venv/bin/python -m uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
printf '%s\n' "$stamp" >.venv/complete
echo "setup: complete"
