#!/usr/bin/env bash
# Builds the Python package from this tree and installs it into $VENV (default .venv), as `pip install .` would. Only what
# changed is built again. If build/release exists, the library is taken from there. With FLASH_ATTENTION_TEST_ALL=1
# (`make test ALL=1`) the package compiles the library itself, as it does for a user.
set -euo pipefail
cd "$(dirname "$0")/.."
log=build/install_python.log
mkdir -p build
library=
if [ -e build/release/build.ninja ] && [ "${FLASH_ATTENTION_TEST_ALL:-}" != 1 ]; then
  tools/build.sh release flash_attention_internal
  library=$PWD/build/release/libflash_attention_internal.a
fi
python=${VENV:-.venv}/bin/python
# Until version 0.2 the distribution had the name of another project; two of them would share the files.
ls "$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"/flash_attention-*.dist-info >/dev/null 2>&1 &&
  "$python" -m pip uninstall --quiet --disable-pip-version-check --yes flash_attention
old_glibc=OFF  # what is tested is linked as what is released: tools/wheels.py
case $(uname -sm) in "Linux x86_64" | "Linux aarch64") old_glibc=ON ;; esac
"$python" -m pip install --disable-pip-version-check --no-build-isolation --no-deps \
  --config-settings "cmake.define.FLASH_ATTENTION_BUILT_LIBRARY=$library" \
  --config-settings "cmake.define.FLASH_ATTENTION_OLD_GLIBC=$old_glibc" . >"$log" 2>&1 || { tail -n 40 "$log" >&2; exit 1; }
