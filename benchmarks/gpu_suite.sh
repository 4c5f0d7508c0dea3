#!/usr/bin/env bash
# Whole steps, their census, kernel bandwidth, memory tiers, determinism and correctness on a GPU, in under 10 minutes; see gpu_suite.py.
# Results go to $OUT (default ./gpu_results). Works from a source checkout, nothing needs to be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
export OUT="${OUT:-$PWD/gpu_results}"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -u -m benchmarks.gpu_suite "$@"
