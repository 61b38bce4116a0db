#!/usr/bin/env bash
# Installs a load tool into an environment of its own: NVIDIA's AIPerf, or GuideLLM. They pin packages
# that this project's environment holds at other versions.
# usage: benchmarks/install_load_tool.sh DIR [aiperf|guidellm]      (some minutes)
set -euo pipefail
dir=${1:?usage: install_load_tool.sh DIR [aiperf|guidellm]}
tool=${2:-aiperf}
case $tool in
    aiperf) packages=("aiperf==${AIPERF_VERSION:-0.13.0}") ;;
    # It asks for any torch, and takes the one that the project pins: where there is a build for CPUs
    # (PIP_FIND_LINKS, PIP_INDEX_URL), gigabytes for GPUs are not fetched.
    guidellm) packages=("torch==${TORCH_VERSION:-2.13.0}" "guidellm==${GUIDELLM_VERSION:-0.8.1}") ;;
    *) echo "$tool: not one of aiperf, guidellm" >&2; exit 2 ;;
esac
"${PYTHON:-python3}" -m venv "$dir"
"$dir/bin/pip" --quiet --disable-pip-version-check install "${packages[@]}"
"$dir/bin/$tool" --version
