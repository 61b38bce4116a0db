#!/usr/bin/env bash
# Makes an environment with llama.cpp, compiled for this processor, to be measured by
# `mars-ray bench decode`. About ten minutes on two cores.
#
#     tools/llamacpp_env.sh DIR
set -euo pipefail

directory=${1:?usage: tools/llamacpp_env.sh DIR}
version=${LLAMACPP_VERSION:-0.3.36}

"${PYTHON:-python3}" -m venv "$directory"
pip() { "$directory/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

# Its own instructions, BF16 products included; no pictures.
export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF ${CMAKE_ARGS:-}"
pip install --no-binary llama-cpp-python "llama-cpp-python==$version" "gguf==0.19.0" safetensors
"$directory/bin/python" -c 'import llama_cpp as l; print(l.__version__, l.llama_print_system_info())'
