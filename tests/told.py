"""What commands say at once, before torch and Ray are imported."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

# The command's own process, which tells at its end what it has imported.
COMMAND = """
import sys
from mars_ray import cli
try:
    sys.argv[0] = "mars-ray"
    cli.main()
finally:
    print(sorted({"torch", "ray", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


def told(*words: str, cwd: Path | None = None) -> str:
    """What the command says of these words; within two seconds of a processor's time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, cwd=cwd
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 2
    *said, imported = done.stderr.splitlines()
    assert imported == "[]"
    assert len(said) == 1
    return said[0]


def looks_like_a_model(directory: Path, **config: Any) -> Path:
    """A directory with the files of a model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros(4, np.float32)}, directory / "model.safetensors")
    return directory
