#!/usr/bin/env bash
# A draft adapter trained and measured on the GPU at hand, in three parts that each go on where they were:
#     benchmarks/gpu_adapt.sh DIRECTORY [PYTHON]
# models/smollm2 must be there. Needs torch for CUDA (with Triton), transformers, pydantic, typer, rich,
# pyarrow and tensorboardX; not Ray. Answers and training take 22 minutes by the job, then identity and
# tokens per forward over 520 prompts, and tokens per second at batch 1 to 16.
set -euo pipefail
cd "$(dirname "$0")/.."
output=$(realpath -m "$1")
python=${2:-python3}
export PYTHONPATH=.:benchmarks
if [ ! -d "$output/adapter" ]; then
    "$python" benchmarks/adapt_alone.py jobs/adapt-smollm2-gpu.toml "$output"
fi
"$python" benchmarks/identity.py jobs/evaluate-smollm2.toml "$output/smollm2_identity_gpu.json" \
    "engine.draft_adapter=$output/adapter"
"$python" -m mars_ray bench decode jobs/bench-decode-smollm2.toml \
    --output "$output/smollm2_decode_gpu.json" "draft_adapter=$output/adapter" \
    'peers=["transformers"]' dtype=bfloat16
