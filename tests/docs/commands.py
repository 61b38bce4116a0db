"""Every command that the documentation shows, and the test that executes it.

Commands are what stands in indented blocks, and Python in fences; all else is fenced as what it is.
A test takes its commands from here (`runs`), so it executes what readers see, with settings behind
it that make it small (`small.py`).
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The log is of what was, and no page of the site.
_DOCS = sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "log.md"})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "jobs" / "README.md", *_DOCS]
_PROGRAM = "python"
_NO_PROGRAMS = {"text", "json", "toml", "yaml"}

_SUBMIT = "ray job submit --working-dir . "
_COMMANDS = "tests/docs/test_commands.py::"
_PLAIN = "tests/docs/test_plain_commands.py::"
_ADVISE = "tests/advise/"
_FIRST = "tests/docs/test_first_steps.py::"
_CLUSTER = "tests/cluster/conftest.py::three_nodes"
_JOBS = "tests/cluster/test_jobs.py::"
_STORY = "tests/cluster/test_story.py::test_the_whole_page"
# By how a command begins; the longest beginning counts.
EXECUTED_BY = {
    "mars-ray train JOB.toml --dry-run": _COMMANDS + "test_a_dry_run_shows_the_job",
    "mars-ray train jobs/train-gsm8k.toml --dry-run": _COMMANDS + "test_a_dry_run_shows_the_job",
    "make wheel": "tests/release/test_wheel.py::installed",
    "pip install dist/": "tests/release/test_wheel.py::installed",
    # On their own.
    "source .venv/bin/activate": "tests/docs/checkout.py::shell",
    "mkdir -p data": _PLAIN + "data",
    "BASE=": _PLAIN + "data",
    "RAW=": _PLAIN + "data",
    "curl --location $": _PLAIN + "data",
    "git clone --depth 1 ": _PLAIN + "data",
    "import json": "tests/serve/test_token_sums.py::test_the_documented_bill",
    "python tools/servegen.py ": _PLAIN + "data",
    "mars-ray evaluate ": _PLAIN + "test_what_needs_no_cluster",
    "mars-ray advise trace.csv ": _ADVISE + "test_advise.py::test_the_documented_command",
    "mars-ray advise http": _ADVISE + "test_rates.py::test_the_documented_command_on_a_server",
    "mars-ray simulate ": _PLAIN + "test_what_needs_no_cluster",
    "python benchmarks/compare_policies.py ": _PLAIN + "test_what_needs_no_cluster",
    "mars-ray import ": _PLAIN + "test_a_model_of_others_is_imported",
    # With a cluster of their own.
    "make demo": _FIRST + "adapted",
    "mars-ray demo": _FIRST + "test_the_demo_goes_on_where_it_was",
    "mars-ray demo jobs/demo-tiny.toml": _FIRST + "demo",
    "mars-ray serve jobs/serve-demo.toml": _FIRST + "service",
    "mars-ray serve models/smollm2 ": _FIRST + "test_a_model_is_served_with_an_adapter",
    "mars-ray serve runs/demo-smollm2/": _FIRST + "test_what_the_demo_measured_is_served",
    "mars-ray chat": _FIRST + "test_a_chat",
    "curl http://127.0.0.1:8000/": _FIRST + "test_any_client",
    "import openai": _FIRST + "test_any_client",
    "mars-ray serve CHECKPOINT": _FIRST + "test_lm_eval",
    "lm-eval run ": _FIRST + "test_lm_eval",
    "mars-ray train ": _FIRST + "test_training",
    "mars-ray generate ": _FIRST + "test_own_answers",
    "mars-ray tune ": _FIRST + "test_a_sweep",
    # On a cluster of three nodes.
    "mars-ray cluster ": _CLUSTER,
    "export RAY_AUTH_MODE=token ": _CLUSTER,
    _SUBMIT + "-- python -m mars_ray train jobs/train-gsm8k.toml output_dir=/shared/": (
        _JOBS + "trained"
    ),
    _SUBMIT + "-- python -m mars_ray train jobs/train-gsm8k.toml output_dir=$PWD/": (
        _JOBS + "test_data_of_the_checkout_goes_with_the_job"
    ),
    _SUBMIT + "-- python -m mars_ray train jobs/train-qwen2.5-": _JOBS + "test_training_for_gpus",
    _SUBMIT + "-- python -m mars_ray serve ": _JOBS + "test_a_service_is_a_job",
    _SUBMIT + "-- python -m mars_ray tune ": _JOBS + "test_the_other_jobs_run_to_their_ends",
    _SUBMIT + "-- python -m mars_ray generate ": _JOBS + "test_the_other_jobs_run_to_their_ends",
    _SUBMIT + "--entrypoint-num-cpus ": _JOBS + "test_the_other_jobs_run_to_their_ends",
    # From a model to a service that grows, on three nodes of its own.
    _SUBMIT + "-- python -m mars_ray generate jobs/generate-smollm2.toml": _STORY,
    _SUBMIT + "-- python -m mars_ray train jobs/train-smollm2.toml": _STORY,
    _SUBMIT + "-- python -m mars_ray tune jobs/tune-smollm2.toml": _STORY,
    _SUBMIT + "--entrypoint-num-cpus 2 -- python -m mars_ray evaluate jobs/evaluate-smollm2.toml": (
        _STORY
    ),
    "ray job submit --submission-id service": _STORY,
    "ray job logs service": _STORY,
    "ray job stop service": _STORY,
    "mkdir -p /shared/models": _STORY,
    "seq 96 ": _STORY,
    "mars-ray status": _STORY,
    "curl http://127.0.0.1:8000/v1/completions": _STORY,
}
# What no test can execute, and why; test_commands.py looks at what can be seen of them.
NOT_HERE = {
    "make test": "executes the tests, this one among them",
    "make setup": "makes the environment that tests run in",
    "make check": "a part of `make test`",
    "make image ": "needs Docker, and bases from a registry",
    'pip install "vllm==': "vLLM pins another torch than we do",
    "pip install --no-deps .": "the same",
    "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ": "needs vLLM: tests/in_vllm/test_vllm_serve.py",
    "guidellm run ": "has an environment of its own: tests/serve/test_load_tools.py",
    "aiperf profile ": "the same",
    "vllm bench serve ": "the same",
    "kubectl ": "needs a Kubernetes cluster",
    "helm ": "needs a Kubernetes cluster",
}


@dataclass(frozen=True, slots=True)
class Command:
    """As a shell takes it, on one line and without its comment; or a whole program in Python."""

    page: str
    text: str

    @property
    def beginning(self) -> str | None:
        """The one by which it is known."""
        known = [each for each in (*EXECUTED_BY, *NOT_HERE) if self.text.startswith(each)]
        return max(known, key=len, default=None)


def shown(page: Path) -> list[Command]:
    """A page's commands. Raises ValueError for a fence that does not say what is in it."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    found = []
    for language, content in re.findall(
        r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    ):
        if language == _PROGRAM:
            found.append(Command(name, content))
        elif language not in _NO_PROGRAMS:
            raise ValueError(f"{name}: a fence of {language or 'nothing'!r}: indent commands")
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    for line in re.findall(r"^    +(\S.*)$", rest, re.MULTILINE):
        command = " ".join(re.sub(r"(^|\s+)# .*$", "", line).split())
        if command:
            found.append(Command(name, command))
    return found


def commands() -> list[Command]:
    """Of all pages."""
    return [command for page in PAGES for command in shown(page)]


def runs(test: str) -> list[str]:
    """The commands that this function executes, each once, in their order."""
    texts = [
        command.text
        for command in commands()
        if EXECUTED_BY.get(command.beginning or "", "").endswith(f"::{test}")
    ]
    assert texts, f"no command is executed by {test}"
    return list(dict.fromkeys(texts))
