#!/usr/bin/env bash
# Builds the Python package from this tree and installs it into $VENV (default .venv), as `pip install .` would; what was built
# before is built again only where it changed.
set -euo pipefail
cd "$(dirname "$0")/.."
log=build/install_python.log
mkdir -p build
"${VENV:-.venv}/bin/python" -m pip install --disable-pip-version-check --no-build-isolation --no-deps . >"$log" 2>&1 ||
  { cat "$log" >&2; exit 1; }
