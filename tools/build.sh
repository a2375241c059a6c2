#!/usr/bin/env bash
# tools/build.sh PRESET [TARGET...]: configures where needed and builds; says how far it is now and then, errors, and one closing line.
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

# Keeps what is not a step of ninja ("[12/340] Building ...") in $other; a line about the steps every 30 s, at a terminal every 5 s.
other=$(mktemp)
trap 'rm -f "$other"' EXIT
tell_steps() {
  local pause=30 said=$SECONDS line done total spent
  [ ! -t 2 ] || pause=5
  while IFS= read -r line; do
    if [[ $line =~ ^\[([0-9]+)/([0-9]+)\]\ [A-Z][a-z]*ing\  ]]; then
      ((SECONDS - said >= pause)) || continue
      said=$SECONDS done=${BASH_REMATCH[1]} total=${BASH_REMATCH[2]} spent=$((SECONDS - start))
      local left=  # the first steps say little: the largest come first
      ((done * 8 < total)) || left=", about $(((total - done) * spent / done)) s left"
      echo "  compiling: step $done of $total, $spent s$left" >&2
    else
      printf '%s\n' "$line" >>"$other"
    fi
  done
}
cmake --build --preset "$preset" ${targets[@]+"${targets[@]}"} 2>&1 | tell_steps || { cat "$other" >&2; exit 1; }
echo "built in $((SECONDS - start)) s" >&2
