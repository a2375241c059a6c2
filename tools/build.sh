#!/usr/bin/env bash
# tools/build.sh PRESET [TARGET...]: configures where needed and builds; says nothing but errors and one closing line.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift
log=build/$preset/configure.log
mkdir -p "build/$preset"
if [ ! -f "build/$preset/build.ninja" ]; then
  echo "configuring build/$preset" >&2
  cmake --preset "$preset" ${FLASH_ATTENTION_CMAKE_ARGS:-} >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
fi
targets=()
[ $# -eq 0 ] || targets=(--target "$@")
start=$SECONDS
echo "building build/$preset ${*:-(everything)}" >&2
output=$(cmake --build --preset "$preset" ${targets[@]+"${targets[@]}"} 2>&1) ||
  { grep -v '^\[[0-9]*/[0-9]*\] [A-Z][a-z]*ing ' <<<"$output" >&2; exit 1; }
echo "built in $((SECONDS - start)) s" >&2
