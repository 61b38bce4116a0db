"""The import order and the ceilings, as tested facts."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mars_ray"
FILES = sorted(PACKAGE.rglob("*.py"))
LEVELS = {
    "__init__": 0,
    "errors": 0,
    "progress": 0,
    "page": 0,
    "provenance": 0,
    "files": 0,
    "config": 0,
    "cluster": 1,
    "core": 1,
    "storage": 1,
    "data": 2,
    "model": 2,
    "autoscale": 2,
    "train": 3,
    "decode": 3,
    "vllm": 3,
    "inputs": 3,
    "evaluate": 4,
    "serve": 4,
    "generate": 4,
    "importing": 4,
    "doctor": 4,
    "simulator": 5,
    "tune": 5,
    "adapt": 5,
    "advise": 6,
    "demo": 6,
    "cli": 7,
    "__main__": 8,
}
ONLY_IN = {
    "ray": {
        "adapt/run.py",
        "train/on_ray.py",
        "generate/on_ray.py",
        "serve/autoscaler.py",
        "serve/deploy.py",
        "serve/threshold_actor.py",
        "serve/ingress/metrics.py",
        "serve/ingress/deployment.py",
        "serve/replica/metrics.py",
        "serve/ingress/client.py",
        "serve/ingress/router.py",
        "tune/results.py",
        "tune/sweep.py",
        "tune/search.py",
        "tune/trial.py",
        "cluster/connection.py",
        "cli.py",
    },
    "deepspeed": {"train/deepspeed.py"},
    "fastapi": {"serve/"},
    "llguidance": {"decode/structured_output.py"},
    "triton": {"decode/attention/kernels.py"},
    "gguf": {"model/gguf.py"},
    "vllm": {"vllm/", "serve/replica/vllm_"},
    "torch": {
        "core/",
        "model/",
        "data/",
        "train/",
        "decode/",
        "vllm/",
        "evaluate/",
        "serve/",
        "doctor.py",
        "importing.py",
    },
}

# Files below 60 lines, and why each is one.
SHORT = {
    "__main__.py": "entry point",
    "decode/info.py": "for processes without torch",
    "decode/model_runner.py": "one step of the engine",
}


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or "", node


def unit(path: Path) -> str:
    """The top-level package or module a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_modules_import_lower_levels_and_their_own_package_only():
    """Guards the architecture: siblings never import each other."""
    wrong = []
    for path in FILES:
        for name, _ in imports(ast.parse(path.read_text())):
            if not name.startswith("mars_ray."):
                continue
            target = name.split(".")[1]
            if target != unit(path) and LEVELS[target] >= LEVELS[unit(path)] > 0:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_heavy_packages_stay_in_their_shells():
    """Guards `import ray` in the pure core: it has to run where Ray is not installed."""
    wrong = []
    for path in FILES:
        place = path.relative_to(PACKAGE).as_posix()
        for name, _ in imports(ast.parse(path.read_text())):
            allowed = ONLY_IN.get(name.split(".")[0])
            if allowed is not None and not any(place.startswith(prefix) for prefix in allowed):
                wrong.append(f"{place} imports {name}")
    assert not wrong


def test_a_replica_knows_its_engine_by_its_client():
    """Guards the border that another engine can stand behind (`serve/replica/engine_client.py`)."""
    engine = ("mars_ray.decode.engine", "mars_ray.decode.async_engine")
    importing = {
        path.name
        for path in FILES
        if path.parent == PACKAGE / "serve" / "replica"
        for name, _ in imports(ast.parse(path.read_text()))
        if name in engine
    }
    assert importing == {"engine_client.py"}


def test_first_party_imports_stand_at_the_top():
    """These import late: the command line, which parses first, what may lack Triton or vLLM, and
    what a driver imports that needs no torch."""
    late = ("cli.py", "decode/attention/paged.py", "model/places.py", "serve/replica/deployment.py")
    late += ("serve/replica/engine_client.py",)
    for path in FILES:
        tree = ast.parse(path.read_text())
        for name, node in imports(tree):
            if name.startswith("mars_ray") and node not in tree.body:
                assert path.relative_to(PACKAGE).as_posix() in late, (
                    f"{path}: {name} is imported inside a function"
                )


def test_files_and_functions_are_neither_long_nor_cut_small():
    """A file has at most 800 lines, a function 100. A thought in five files of 40 lines is harder
    to read than in one: a file below 60 lines stands in `SHORT` with its reason."""
    wrong = []
    for path in FILES:
        text, name = path.read_text(), path.relative_to(PACKAGE).as_posix()
        lines = text.count("\n")
        if lines > 800:
            wrong.append(f"{name}: {lines} lines; divide it")
        if lines < 60 and path.name != "__init__.py" and name not in SHORT:
            wrong.append(f"{name}: {lines} lines; merge it, or give a reason in SHORT")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 100:
                    wrong.append(f"{name}: {node.name} has {length} lines")
    assert not wrong


def test_the_list_of_short_files_is_no_longer_than_it_must_be():
    """Guards reasons of files that have grown, moved or gone."""
    short = {
        name
        for name in SHORT
        if (PACKAGE / name).exists() and (PACKAGE / name).read_text().count("\n") < 60
    }
    assert set(SHORT) == short


@pytest.mark.parametrize(
    "module", ["serve.deploy", "serve.ingress.deployment", "serve.threshold_actor", "cli"]
)
def test_processes_without_a_model_import_no_torch(module):
    """Guards drivers, ingresses, actors and a controller that take seconds and hundreds of MB more.
    `serve.deploy` imports what Serve's controller runs, `serve.autoscaler`."""
    heavy = {"torch", "transformers"}
    code = f"import sys, mars_ray.{module}; sys.exit(not {heavy}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_module_names_in_strings_and_files_exist():
    """What no type checker reads: scripts within tests, an image's build steps, manifests. Guards
    a renamed module that is noticed when an image is built."""
    root = PACKAGE.parent
    places = ["tests", "deploy", "jobs", "clusters", "benchmarks/*.py", "Makefile"]
    done = subprocess.run(["git", "ls-files", *places], cwd=root, capture_output=True, text=True)
    listed = done.stdout.split()
    if not listed:
        pytest.skip("not a checkout")
    missing = set()
    for name in listed:
        try:
            text = (root / name).read_text()
        except UnicodeDecodeError:
            continue
        for module in re.findall(r"(?:from|import|,) (mars_ray(?:\.[a-z_0-9]+)+)", text):
            path = root.joinpath(*module.split("."))
            if not (path.is_dir() or path.with_suffix(".py").is_file()):
                missing.add((name, module))
    assert not missing
