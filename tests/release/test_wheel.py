"""The wheel, in an environment of its own, far from the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from docs.checkout import add_environment
from docs.commands import runs

from mars_ray import __version__
from mars_ray.decode.cpu.compiling import compiler
from mars_ray.decode.cpu.library import supported

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "Makefile", "constraints.txt")
# All in one interpreter: starting it forty times would take a minute.
SMOKE = """
import sys
from pathlib import Path
import mars_ray
from mars_ray.cli import app
from mars_ray.config.load import JOB_KINDS, load_job
from mars_ray.simulator.config import KINDS
from mars_ray.autoscale.service_model import load_service_model
from typer.main import get_command
from typer.testing import CliRunner

def commands(command, words=()):
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))

everything = list(commands(get_command(app)))
for words in everything:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, (words, result.output)
assert (Path(mars_ray.__file__).parent / "serve/ingress/page/marked.mjs").exists()
shipped = Path(mars_ray.__file__).parent / "jobs"
for path in sorted(shipped.glob("*.toml")):
    load_job(f"jobs/{path.name}", kinds=JOB_KINDS | KINDS)
load_service_model("jobs/models/7b-paper.json")
print(mars_ray.__file__, len(everything), len(list(shipped.glob("*.toml"))))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin of a new environment with the wheel; dependencies are those of this environment."""
    directory = tmp_path_factory.mktemp("wheel")
    make, install = runs("installed")
    copy_sources(directory)
    add_environment(directory)
    # pip's way to say that what builds is here already.
    run(["bash", "-c", make], directory, PIP_NO_BUILD_ISOLATION="0")
    (wheel,) = (directory / "dist").glob("*.whl")
    assert wheel.name.startswith(f"mars_ray-{__version__}-")
    environment = directory / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], directory)
    settings = {"PIP_PYTHON": str(environment / "bin" / "python"), "PIP_NO_DEPS": "1"}
    settings["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run(["bash", "-c", install], directory, **settings)
    packages = next((environment / "lib").glob("python*")) / "site-packages"
    # A path file of a path file is not read, so an editable installation there stays unseen.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return environment / "bin"


def copy_sources(directory: Path) -> None:
    for name in FILES:
        shutil.copy(ROOT / name, directory)
    for name in ("mars_ray", "jobs", "adapters"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, directory / name, symlinks=True, ignore=ignored)


def run(command: list, directory: Path, **settings: str) -> str:
    """In another directory than the checkout, and without a way back to it."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= settings
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=directory, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_command_and_job_file_is_there(installed, tmp_path):
    """Guards files that only a checkout has."""
    place, commands, jobs = run([installed / "python", "-c", SMOKE], tmp_path).split()
    assert Path(place).is_relative_to(installed.parent)
    assert int(commands) >= 15
    assert int(jobs) == len(list((ROOT / "jobs").glob("*.toml")))


@pytest.mark.slow
def test_the_demo_needs_no_argument(installed, tmp_path):
    """Guards the first thing that a new user tries."""
    job = json.loads(run([installed / "mars-ray", "demo", "--dry-run"], tmp_path))
    assert job["kind"] == "demo"


COMPILED = """
from pathlib import Path
from mars_ray.decode.cpu import library
from mars_ray.decode.cpu.compiling import INSTRUCTION_SETS, file_name
assert all((library.SOURCES / file_name(name)).exists() for name in INSTRUCTION_SETS)
library.build = None  # nothing is compiled
name, loaded = library.library()
print(name, loaded._name)
"""


@pytest.mark.slow
@pytest.mark.skipif(not compiler() or not supported(), reason="needs g++ and AVX2")
def test_the_compiled_step_comes_with_it(installed, tmp_path):
    """Guards images, which have no compiler: the library is the wheel's own, for this processor."""
    name, path = run([installed / "python", "-c", COMPILED], tmp_path).split()
    assert name in supported()
    assert Path(path).is_relative_to(installed.parent)
    assert Path(path).name == f"step_{name}.so"


def test_the_source_distribution_has_the_sources(tmp_path):
    """Whoever builds from it gets the compiled step, the job files and the page as well."""
    copy_sources(tmp_path)
    program = "import setuptools.build_meta as build; print(build.build_sdist('dist'))"
    name = run([sys.executable, "-c", program], tmp_path).split()[-1]
    with tarfile.open(tmp_path / "dist" / name) as archive:
        found = {path.partition("/")[2] for path in archive.getnames()}
    wanted = [*(ROOT / "mars_ray" / "decode" / "cpu").glob("*.[ch]*"), ROOT / "setup.py"]
    wanted += [
        *(ROOT / "mars_ray").rglob("*.py"),
        *(ROOT / "mars_ray/serve/ingress/page").iterdir(),
    ]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= found
    assert {f"mars_ray/jobs/{path.name}" for path in (ROOT / "jobs").glob("*.toml")} <= found
