#!/usr/bin/env bash
# Decoding on the GPU at hand, at the shapes of Qwen2.5-0.5B and 7B: results as JSON in a directory.
#     benchmarks/gpu_decode.sh [DIRECTORY] [PYTHON] [KEY=VALUE ...]
# Needs torch for CUDA (with Triton), transformers, pydantic, typer and rich, for training tensorboardX;
# not Ray. Every part has its own time limit, nine minutes in all; what was measured by then is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-benchmarks/results}
python=${2:-python3}
shift $(($# < 2 ? $# : 2))
bench() { # NAME SECONDS JOB [KEY=VALUE ...]
    local name=$1 seconds=$2 job=$3
    shift 3
    PYTHONPATH=. timeout "$seconds" "$python" benchmarks/compare_decoders.py \
        "benchmarks/decoders/$job.toml" \
        --output "$output/$name.json" "$@" ||
        echo "$name: no result within $seconds s" >&2
}
# What a step costs by rows, masks and sequences: half a minute for both shapes.
PYTHONPATH=.:benchmarks timeout 150 "$python" benchmarks/gpu_steps.py "$output/gpu_step.json" \
    qwen2.5-0.5b qwen2.5-7b || echo "gpu_steps: not complete" >&2
bench decode_gpu_0_5b 90 bench-decode-gpu "$@"
# One sequence with a long prompt: what attention to it costs a step.
bench decode_gpu_0_5b_long 40 bench-decode-gpu 'batch_sizes=[1]' prompts=1 \
    random_prompt_tokens=8000 max_context=8192 'step_positions=[]' 'peers=["transformers"]' "$@"
bench decode_gpu_7b 190 bench-decode-gpu random_weights=qwen2.5-7b "$@"
# Real acceptance, on the demo's small model: that of jobs/demo-tiny.toml, or one trained here.
model=runs/demo/models/mars
if [ ! -d "$model" ]; then
    model=runs/gpu-demo/model
    PYTHONPATH=. timeout 140 "$python" benchmarks/without_ray.py jobs/demo-tiny.toml runs/gpu-demo ||
        echo "the demo's model: not trained within 140 s" >&2
fi
if [ -d "$model" ]; then
    bench decode_gpu_demo 80 bench-decode-demo "checkpoint=$model" 'lockstep=[]' prompts=16 \
        'batch_sizes=[1, 8, 64]' "$@"
fi
