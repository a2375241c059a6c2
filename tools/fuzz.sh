#!/usr/bin/env bash
# New covering arrays of problems (tests/fuzz/generator) on the CPU and in the emulator, and tests/fuzz/call_fuzzer.cpp, built
# with clang, libFuzzer and the sanitizers: FUZZ_SECONDS (60) for each. Inputs that reach new code are kept in
# build/fuzz/corpus, an input that fails in build/fuzz. FUZZ_SEED repeats the arrays of a run.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-60} seed=${FUZZ_SEED:-$(date +%s)}
tools/build.sh release flash-attention
for device in "cpu" "emulator --arch sm_80 --kernel all" "emulator --arch sm_90 --kernel all"; do
  echo "== covering arrays on $device, seed $seed"
  # shellcheck disable=SC2086
  build/release/flash-attention stress --device $device --seed "$seed" --minutes "$(awk "BEGIN {print $seconds / 60}")"
done
tools/build.sh fuzz call_fuzzer
mkdir -p build/fuzz/corpus
cd build/fuzz
exec tests/fuzz/call_fuzzer corpus -max_len=400 -max_total_time="$seconds" -print_final_stats=1
