#!/usr/bin/env bash
# A draft adapter trained on the GPU at hand, on answers that were made elsewhere, without Ray:
#     benchmarks/gpu_adapt.sh ADAPTATION OUTPUT [STEPS] [PYTHON]
# ADAPTATION has the adapt.json, train.jsonl and held_out.jsonl of a `mars-ray adapt` run, whose model must
# be there. A step is eight rows of packed conversations; 648 took three minutes of an H200. Needs torch for
# CUDA (with Triton), transformers, pydantic, typer, rich, pyarrow and tensorboardX. The adapter is
# OUTPUT/adapter.parts/all parts.adapter, T/F during the training is in OUTPUT/adapter.json.
set -euo pipefail
cd "$(dirname "$0")/.."
adaptation=$(realpath "$1")
output=$(realpath -m "$2")
mkdir -p "$output"
PYTHONPATH=.:benchmarks timeout 480 "${4:-python3}" benchmarks/adapter_parts.py \
    "$adaptation" "$output/adapter.json" "${3:-600}" "all parts"
