#!/usr/bin/env bash
# Decoding on the GPU at hand, at the shapes of Qwen2.5-0.5B and 7B: results as JSON in a directory.
#     benchmarks/gpu_decode.sh [DIRECTORY] [PYTHON] [KEY=VALUE ...]
# Needs torch, transformers, pydantic, typer and rich; not Ray. Every part has its own time limit,
# nine minutes in all; what was measured by then is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-benchmarks/results}
python=${2:-python3}
shift $(($# < 2 ? $# : 2))
bench() { # NAME SECONDS JOB [KEY=VALUE ...]
    local name=$1 seconds=$2 job=$3
    shift 3
    timeout "$seconds" "$python" -m mars_ray bench decode "$job" \
        --output "$output/$name.json" "$@" ||
        echo "$name: not finished within $seconds s" >&2
}
bench decode_gpu_0_5b 150 jobs/bench-decode-gpu.toml "$@"
bench decode_gpu_7b 320 jobs/bench-decode-gpu.toml random_weights=qwen2.5-7b "$@"
if [ -d runs/demo/models/mars ]; then # real acceptance, on the demo's small model
    bench decode_gpu_demo 60 jobs/bench-decode-demo.toml 'lockstep=[]' "$@"
fi
