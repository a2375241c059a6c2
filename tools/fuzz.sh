#!/usr/bin/env bash
# Builds tests/fuzz/call_fuzzer.cpp with clang, libFuzzer and the sanitizers, and runs it for FUZZ_SECONDS (60).
# Inputs that reach new code are kept in build/fuzz/corpus, an input that fails in build/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/build.sh fuzz call_fuzzer
mkdir -p build/fuzz/corpus
cd build/fuzz
exec tests/fuzz/call_fuzzer corpus -max_len=400 -max_total_time="${FUZZ_SECONDS:-60}" -print_final_stats=1
