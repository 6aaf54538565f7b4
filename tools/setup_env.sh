#!/usr/bin/env bash
# Makes or completes the environment .venv in the checkout; safe to run again at any time.
#
#   PYTHON=python3.11            the interpreter to build .venv from
#   MMCV_WHEEL=path/to/mmcv.whl  use this wheel instead of compiling mmcv's operators
#   CPVT_WHEEL_CACHE=folder      where the compiled wheel is kept (default ~/.cache/cpvt_pyramid)
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

# Done already with these very files? Then this costs a few milliseconds.
stamp=$(cat requirements/*.txt tools/setup_env.sh setup.py | sha256sum)
if [ "$(cat .venv/complete 2>/dev/null)" = "$stamp" ] && [ -z "${MMCV_WHEEL:-}" ]; then
  .venv/bin/python -c '' 2>/dev/null && exit 0
fi

command -v "$python" >/dev/null || fail "no $python here; name a Python 3.11 with PYTHON=..."
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || fail "$python is Python $version; the pinned packages are for 3.11 (PYTHON=...)"
command -v g++ >/dev/null || [ -n "${MMCV_WHEEL:-}" ] ||
  fail "no g++ here to compile mmcv's operators; install a C++ compiler or name a wheel with MMCV_WHEEL=..."

# One set-up at a time: a second one waits for the first.
exec 9>.setup.lock
if ! flock -n 9; then
  echo "setup: another set-up of this checkout is running; waiting for it"
  flock 9
fi

echo "setup: packages"
# A half-made .venv (interrupted, or its interpreter gone) is made anew.
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
  [ -f "$MMCV_WHEEL" ] || fail "MMCV_WHEEL=$MMCV_WHEEL is no file"
  install_wheel "$MMCV_WHEEL"
  operators_load || fail "the operators in $MMCV_WHEEL do not load with this torch and Python; unset MMCV_WHEEL to compile them"
elif ! .venv/bin/python -c "from importlib.metadata import version; assert version('${mmcv%==*}') == '${mmcv#*==}'" 2>/dev/null || ! operators_load; then
  # The wheel holds compiled code: one per mmcv, torch, Python and kind of device.
  tag=$(.venv/bin/python - <<'EOF'
import sys, torch
from torch.utils.cpp_extension import CUDA_HOME
device = 'cuda' if torch.cuda.is_available() and CUDA_HOME else 'cpu'
print(f'torch{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}-{device}')
EOF
  )
  # Without nvcc mmcv's build would stop at the first CUDA file; for the CPU alone it goes through.
  [[ $tag == *-cuda ]] || export CUDA_VISIBLE_DEVICES=
  folder=$cache/${mmcv/==/-}-$tag
  mkdir -p "$folder"
  exec 8>"$folder/lock"
  flock -n 8 || { echo "setup: another set-up is compiling mmcv; waiting for it"; flock 8; }
  wheel=$(find "$folder" -maxdepth 1 -name "*.whl" -print -quit)
  if [ -z "$wheel" ]; then
    echo "setup: compiling mmcv's operators, once (15 to 30 minutes on 2 cores; log: $folder/build.log)"
    # The sources are kept until the wheel is there, so an interrupted build goes on where it was.
    if [ ! -d "$folder/source" ]; then
      rm -rf "$folder/download"
      .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
        --no-build-isolation --no-binary :all: --dest "$folder/download" "$mmcv"
      mkdir "$folder/download/source"
      tar -xzf "$folder"/download/*.tar.gz -C "$folder/download/source" --strip-components 1
      mv "$folder/download/source" "$folder/source"
    fi
    # Not isolated: an isolated build sees no torch and silently leaves the operators out.
    PATH=$PWD/.venv/bin:$PATH MMCV_WITH_OPS=1 MAX_JOBS=${MAX_JOBS:-$(nproc)} \
      .venv/bin/python -m pip wheel -v --disable-pip-version-check --no-deps --no-build-isolation \
      --wheel-dir "$folder/built" "$folder/source" 2>&1 |
      tee "$folder/build.log" | grep --line-buffered -oE '\[[0-9]+/[0-9]+\]' ||
      fail "mmcv did not compile; see $folder/build.log"
    mv "$folder"/built/*.whl "$folder"/
    rm -rf "$folder/built" "$folder/source" "$folder/download"
    wheel=$(find "$folder" -maxdepth 1 -name "*.whl" -print -quit)
  fi
  install_wheel "$wheel"
  operators_load || fail "mmcv was installed but its operators do not load; remove $folder and run again"
  exec 8>&-
fi

.venv/bin/python -m uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
printf '%s\n' "$stamp" >.venv/complete
echo "setup: complete"
