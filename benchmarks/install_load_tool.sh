#!/usr/bin/env bash
# Installs NVIDIA's AIPerf, the load tool of benchmarks/serve_load.py, into an environment of its own:
# it pins packages that this project's environment holds at other versions.
# usage: benchmarks/install_load_tool.sh DIR      (about one minute)
set -euo pipefail
dir=${1:?usage: install_load_tool.sh DIR}
python3 -m venv "$dir"
"$dir/bin/pip" --quiet --disable-pip-version-check install "aiperf==${AIPERF_VERSION:-0.13.0}"
"$dir/bin/aiperf" --version
