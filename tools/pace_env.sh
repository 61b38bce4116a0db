#!/usr/bin/env bash
# Makes an environment with AMD PACE, to be measured by `mars-ray bench decode`. It wants AVX512-BF16,
# and torch for CPUs by a name that PyPI does not have: its plain name will do.
#
#     tools/pace_env.sh DIR
set -euo pipefail

directory=${1:?usage: tools/pace_env.sh DIR}

"${PYTHON:-python3}" -m venv "$directory"
pip() { "$directory/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install "torch==${TORCH_VERSION:-2.13.0}" "amd-pace==${PACE_VERSION:-1.3.0}"
"$directory/bin/python" -c 'import torch, pace; print("PACE", pace.__version__)'
