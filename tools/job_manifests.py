"""Writes the files generated from one table of submissions: the lines of jobs/README.md, and the
jobs that the Helm chart knows by name; and of the alerts the runbooks' addresses.

    python tools/job_manifests.py            # writes them
    python tools/job_manifests.py --check    # exit code 1 if they are out of date
"""

import argparse
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

ROOT = Path(__file__).parents[1]
_ALERTS = ROOT / "deploy" / "monitoring" / "alerts.yml"
_README = ROOT / "jobs" / "README.md"
_BEGIN, _END = "<!-- submissions -->\n", "<!-- /submissions -->"
_CHART_JOBS = ROOT / "deploy" / "chart" / "files" / "jobs.yaml"
_GENERATED = "# Written by tools/job_manifests.py.\n"


@dataclass(frozen=True, slots=True)
class Submission:
    """A job file as it is submitted.

    Training and generation request their workers from the cluster themselves. A job that computes
    in the driver must request the driver's resources (`cpus`, `gpus`).
    """

    job: str
    command: str
    about: str
    pool: Literal["cpu", "gpu"] = "cpu"
    options: str = ""  # after the job file; /shared is storage that all nodes see
    cpus: int = 0
    gpus: int = 0
    hours: int = 4

    @property
    def line(self) -> str:
        """The command line with `ray job submit`, run from a checkout."""
        place = "".join(
            f" --entrypoint-num-{kind} {count}"
            for kind, count in (("cpus", self.cpus), ("gpus", self.gpus))
            if count
        )
        return f"ray job submit --working-dir .{place} -- {self.entrypoint}"

    @property
    def entrypoint(self) -> str:
        """The command that runs on the cluster."""
        return f"python -m mars_ray {self.command} jobs/{self.job}.toml {self.options}"


def _runs(name: str) -> str:
    return f"output_dir=/shared/runs/{name}"


def _own_answers(data: str) -> str:
    answers = "'[\"/shared/runs/own-answers/smollm2.jsonl\"]'"
    return f"{data}.train.paths={answers} {data}.eval.paths={answers}"


def _gsm8k(key: str, file: str) -> str:
    return f"{key}.paths='[\"/shared/data/gsm8k/{file}\"]'"


SUBMISSIONS = (
    Submission(
        "train-gsm8k",
        "train",
        "both stages from scratch on GSM8K, two workers without GPUs",
        options=f"{_runs('gsm8k')} {_gsm8k('data.train', 'train.jsonl.gz')} "
        f"{_gsm8k('data.eval', 'test.jsonl')}",
    ),
    Submission(
        "train-qwen2.5-0.5b",
        "train",
        "Qwen2.5-0.5B, both stages, eight GPUs",
        "gpu",
        options=_runs("qwen2.5-0.5b"),
        hours=96,
    ),
    Submission(
        "train-qwen2.5-0.5b-control",
        "train",
        "the paper's control: AR fine-tuning for as long as both stages take",
        "gpu",
        options=_runs("qwen2.5-0.5b-control"),
        hours=96,
    ),
    Submission(
        "train-qwen2.5-0.5b-no-sft-loss",
        "train",
        "the paper's ablation: no loss on the clean stream",
        "gpu",
        options=_runs("qwen2.5-0.5b-no-sft-loss"),
        hours=96,
    ),
    Submission(
        "train-qwen2.5-7b",
        "train",
        "Qwen2.5-7B, both stages, eight GPUs",
        "gpu",
        options=_runs("qwen2.5-7b"),
        hours=240,
    ),
    Submission(
        "train-qwen2.5-32b",
        "train",
        "Qwen2.5-32B, both stages, thirty-two GPUs on four machines",
        "gpu",
        options=_runs("qwen2.5-32b"),
        hours=480,
    ),
    Submission(
        "tune-demo",
        "tune",
        "a sweep over mask schedules, from the tiny demo's first stage",
        options=f"{_runs('tune-demo')} train.output_dir=/shared/runs/tune-demo/best "
        "train.model.path=/shared/runs/demo/models/ar",
    ),
    Submission(
        "tune-gsm8k",
        "tune",
        "eight mask schedules of equal minutes, from the first stage of `train-gsm8k`",
        options=f"{_runs('tune-gsm8k')} train.output_dir=/shared/runs/tune-gsm8k/best "
        "train.model.path=/shared/runs/gsm8k/models/ar "
        f"{_gsm8k('train.data.train', 'train.jsonl.gz')} {_gsm8k('train.data.eval', 'test.jsonl')} "
        f"{_gsm8k('objectives.task.kinds.gsm8k', 'test.jsonl')}",
    ),
    Submission(
        "generate-demo",
        "generate",
        "a model's own answers, for its second stage, with engines all over the cluster",
        options="checkpoint=/shared/runs/demo/models/ar output=/shared/runs/own-answers/demo.jsonl",
    ),
    Submission(
        "generate-smollm2",
        "generate",
        "a pretrained model's own answers (docs/start/on-a-cluster.md)",
        options="checkpoint=/shared/models/smollm2 output=/shared/runs/own-answers/smollm2.jsonl",
    ),
    Submission(
        "train-smollm2",
        "train",
        "MARS on a pretrained model: a LoRA, two workers without GPUs",
        options=f"{_runs('smollm2')} model.path=/shared/models/smollm2 {_own_answers('data')}",
    ),
    Submission(
        "tune-smollm2",
        "tune",
        "three mask schedules for it, each for a few steps",
        options=f"{_runs('tune-smollm2')} train.output_dir=/shared/runs/tune-smollm2/best "
        "train.model.path=/shared/models/smollm2 train.stages.mars.steps=4 "
        f"train.cluster.workers=1 {_own_answers('train.data')}",
    ),
    Submission(
        "evaluate-gsm8k",
        "evaluate",
        "the frontier of the model that `train-gsm8k` made",
        options="checkpoint=/shared/runs/gsm8k/models/mars task.path=/shared/data/gsm8k/test.jsonl",
        cpus=2,
    ),
    Submission(
        "bench-demo",
        "bench",
        "our modes beside transformers, on the tiny demo's model",
        options="--output /shared/runs/bench-demo.json checkpoint=/shared/runs/demo/models/mars",
        cpus=2,
    ),
    Submission(
        "simulate-demo",
        "simulate",
        "scaling policies on made traces, in a minute",
        options="--output /shared/runs/simulate-demo",
        cpus=2,
    ),
    Submission(
        "export-demo",
        "export",
        "a model to where services load it from",
        options="checkpoint=/shared/runs/demo/models/mars destination=/shared/models/mars-demo-1",
        cpus=1,
    ),
)
# Job files that are not submitted to a cluster, and why.
OTHERS = {
    "demo": "everything on one machine: `make demo`",
    "demo-tiny": "the same from random weights: `mars-ray demo jobs/demo-tiny.toml`",
    "adapt-smollm2": "an adaptation of hours, whose data lie beside the checkout: `mars-ray adapt`",
    "adapt-smollm2-gpu": "the same for a GPU, for which benchmarks/gpu_adapt.sh needs no cluster",
    "evaluate-smollm2": "its measurement, likewise: `mars-ray evaluate`",
    "serve-demo": "a service: `mars-ray serve`, or deploy/chart",
    "serve-models": "a service: `mars-ray serve`, or deploy/chart",
    "serve-qwen2.5-7b": "a service by vLLM: `mars-ray serve`, or deploy/chart",
    "serve-qwen2.5-32b": "the same with two GPUs for each replica: `mars-ray serve`, deploy/chart",
}


def chart_job(submission: Submission) -> dict[str, Any]:
    """A job as the chart knows it. The image has the job files, so nothing is uploaded."""
    return {
        "entrypoint": submission.entrypoint.rstrip(),
        "machines": submission.pool,
        "cpus": submission.cpus,
        "gpus": submission.gpus,
        "hours": submission.hours,
    }


def with_runbooks(text: str) -> str:
    """The alerts with addresses on the site that mkdocs.yml names."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["site_url"]
    return re.sub(r"(?<=runbook_url: )\S+?/(?=operate/)", lambda _: site, text)


def files() -> dict[Path, str]:
    """The content of all files by path."""
    jobs = {submission.job: chart_job(submission) for submission in SUBMISSIONS}
    alerts = (_ALERTS, _ALERTS.with_name("alerts_test.yml"))
    before, _, rest = _README.read_text().partition(_BEGIN)
    return {
        _CHART_JOBS: _GENERATED + yaml.safe_dump(jobs, sort_keys=False, width=1000),
        _README: before + _BEGIN + _lines() + _END + rest.partition(_END)[2],
        **{path: with_runbooks(path.read_text()) for path in alerts},
    }


def _lines() -> str:
    shown = "\n".join(f"    # {entry.about}\n{_broken(entry.line)}" for entry in SUBMISSIONS)
    others = "".join(f"- `{name}.toml` is {why}\n" for name, why in OTHERS.items())
    return f"\n{shown}\n{others}\n"


def _broken(line: str) -> str:
    """A long line broken into several for a shell."""
    words = textwrap.wrap(line, 90, break_long_words=False, break_on_hyphens=False)
    return (
        " \\\n".join(
            "    " + ("    " if number else "") + part for number, part in enumerate(words)
        )
        + "\n"
    )


def main() -> int:
    """Writes the files, or names those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check_only = parser.parse_args().check
    stale = [path for path, text in files().items() if path.read_text() != text]
    for path in stale:
        if check_only:
            print(f"{path.relative_to(ROOT)} is not up to date", file=sys.stderr)
        else:
            path.write_text(files()[path])
    return int(check_only and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
