#!/usr/bin/env bash
# tools/prepare.sh STAGES... -- [TARGET...]: what `make run` and `make test` begin with. Packages for Python arrive while the
# library compiles. If either fails, the other stops at once.
set -euo pipefail
cd "$(dirname "$0")/.."
stages=()
while [ "$1" != -- ]; do stages+=("$1"); shift; done
shift
tools/setup.sh system build "${stages[@]}"

set -m  # each has a process group, which can be stopped as a whole
tools/build.sh release "$@" &
build=$!
tools/setup.sh "${stages[@]}" &
setup=$!
trap 'kill -- -$build -$setup 2>/dev/null || true' EXIT
wait -n || exit 1
wait -n || exit 1
trap - EXIT
