#!/usr/bin/env bash
# tools/setup.sh STAGE...: makes sure that what a stage needs is here; costs nothing when it is.
#
#   build   compiler, CMake, Ninja, GoogleTest, pkg-config
#   run     Python as it is; a virtual environment with NVRTC if there is an NVIDIA GPU
#   test    Python headers and every package the tests and benchmarks import
#   lint    clang++, clang-format, clang-tidy, ruff
#   fuzz    clang++
#   docs    mkdocs-material, and playwright, which drives a browser
#   wheels  Python headers, what makes virtual environments, and NVRTC for the kernels that wheels carry
#   packages  what cpack calls
#
# `tools/setup.sh system STAGE...` installs the system packages alone.
#
# System packages are installed with apt where that is allowed (root, or sudo without a password); otherwise the exact
# line to type is printed. Python packages go into $VENV (default .venv) and nowhere else.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

system_only=false
[ "${1:-}" != system ] || { system_only=true; shift; }
missing=()
need_command() { command -v "$1" >/dev/null || missing+=("$2"); }
need_header() { [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ] || missing+=("$2"); }

for stage in "$@"; do
  case $stage in
    build)
      need_command g++ g++
      need_command cmake cmake
      need_command ninja ninja-build
      need_command pkg-config pkg-config
      need_header gtest/gtest.h libgtest-dev
      ;;
    run) need_command python3 python3 ;;
    test)
      need_command python3 python3
      need_command file file # cpack looks with it for programs, to find what they need
      need_command rsvg-convert librsvg2-bin # draws the charts, to see that they have colours
      ! command -v dpkg >/dev/null || need_command dpkg-shlibdeps dpkg-dev
      ;;
    packages)
      need_command file file
      ! command -v dpkg >/dev/null || need_command dpkg-shlibdeps dpkg-dev
      ;;
    lint)
      need_command python3 python3
      need_command clang-format clang-format
      need_command clang-tidy clang-tidy
      need_command clang++ clang
      ;;
    fuzz) need_command clang++ clang ;;
    docs | wheels) need_command python3 python3 ;;
    *)
      echo "setup: unknown stage '$stage'; allowed: build run test lint fuzz docs wheels packages" >&2
      exit 2
      ;;
  esac
done

wants_venv=false
for stage in "$@"; do
  case $stage in
    run) [ ! -e /dev/nvidiactl ] || wants_venv=true ;;
    test | lint | docs | wheels) wants_venv=true ;;
  esac
done
if $wants_venv && [ ! -x "$venv/bin/python" ]; then
  if ! command -v python3 >/dev/null; then
    missing+=(python3-venv python3-dev)
  else
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    python3 -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
      missing+=(python3-dev)
  fi
fi

if [ ${#missing[@]} -gt 0 ]; then
  install="apt-get install -y --no-install-recommends ${missing[*]}"
  if ! command -v apt-get >/dev/null; then
    echo "setup: missing: ${missing[*]} (Debian's names). Install them with your system's package manager." >&2
    exit 1
  elif [ "$(id -u)" = 0 ]; then
    as_root=()
  elif sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  else
    echo "setup: some system packages are missing and I may not install them. Please type:" >&2
    echo "  sudo apt-get update && sudo $install" >&2
    exit 1
  fi
  echo "setup: $install" >&2
  export DEBIAN_FRONTEND=noninteractive
  ${as_root[@]+"${as_root[@]}"} apt-get update -qq
  # shellcheck disable=SC2086
  ${as_root[@]+"${as_root[@]}"} $install -qq >/dev/null
fi

! $system_only || exit 0
requirements=()
for stage in "$@"; do
  case $stage in
    run) [ ! -e /dev/nvidiactl ] || requirements+=(tools/requirements/nvrtc.txt) ;;
    test)
      requirements+=(tools/requirements/plots.txt tools/requirements/nvrtc.txt tools/requirements/test.txt)
      [ ! -e tests/python/requirements.txt ] || requirements+=(tests/python/requirements.txt)
      ;;
    wheels) requirements+=(tools/requirements/nvrtc.txt) ;;  # the kernels that they carry are compiled
    lint) requirements+=(tools/requirements/lint.txt) ;;
    docs) requirements+=(tools/requirements/docs.txt) ;;
  esac
done
[ ${#requirements[@]} -gt 0 ] || exit 0
mapfile -t requirements < <(printf '%s\n' "${requirements[@]}" | sort -u)

# A stamp per requirement file, named by its content: nothing to do where all are there.
todo=()
stamps=()
for file in "${requirements[@]}"; do
  stamp="$venv/.installed-$(sha256sum "$file" | cut -c1-16)"
  [ -e "$stamp" ] || { todo+=(-r "$file"); stamps+=("$stamp"); }
done
[ ${#todo[@]} -gt 0 ] || exit 0

if [ ! -x "$venv/bin/python" ]; then
  echo "setup: making $venv" >&2
  python3 -m venv "$venv"
fi
if [[ " ${todo[*]} " == *" tests/python/requirements.txt "* ]] && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  echo "setup: torch brings NVIDIA's CUDA libraries: about 3 GB to download, 5 GB in $venv" >&2
fi
echo "setup: pip install ${todo[*]}" >&2
log=$(mktemp)
# Not compiled ahead: of 12700 files a run imports a few, and to compile all takes a minute.
"$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --progress-bar off "${todo[@]}" >"$log" 2>&1 </dev/null &
pip=$!
trap 'kill $pip 2>/dev/null || true; rm -f "$log"' EXIT
pause=30
[ ! -t 2 ] || pause=5
for ((second = 1; ; ++second)); do
  kill -0 $pip 2>/dev/null || break
  sleep 1
  ((second % pause)) || echo "  installing: $second s, $(grep -oE '(Downloading|Collecting|Building|Installing) [^ ]+( \([0-9.]+ [kMG]B\))?' "$log" | tail -n 1)" >&2
done
wait $pip || { tail -n 15 "$log" >&2; echo "setup: pip install failed" >&2; exit 1; }
echo "installed in $SECONDS s" >&2
touch "${stamps[@]}"
