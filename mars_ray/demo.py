"""The demo: from a package to a model with drafts that answers over HTTP, and how fast it does.

An adapter is trained for some minutes, then one that was trained for longer takes its place.
Besides the files of the adaptation (`adapt.run`) it writes:

    output_dir/untrained/    the untrained adapter, with frontier.json
    output_dir/shipped/      measurements with the adapter that comes with the package, its serve
                             job and its page; trained_here/ if there is none

When run again, it resumes. The tiny demo (`run_tiny_demo`) does it from random weights.
"""

import json
import shutil
import time
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.request import Request

import tomli_w
from rich.console import Console

from mars_ray.adapt.jobs import Places, service_table
from mars_ray.adapt.report import Speed, write_report
from mars_ray.adapt.run import adaptation, base_model, run_adaptation
from mars_ray.adapt.speed import measure_speeds
from mars_ray.cluster.connection import Connect, already
from mars_ray.cluster.machine import urlopen
from mars_ray.config.base import found
from mars_ray.config.demo import DemoJob, TinyDemoJob
from mars_ray.config.evaluate import EvaluateJob, PromptsTask
from mars_ray.config.inputs import FilesSource
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.config.serve import ServeJob
from mars_ray.core.frontier import Frontier, mode_label, read_frontier
from mars_ray.data.corpus import problems
from mars_ray.evaluate.bench import TRANSFORMERS, decode_beside, identical
from mars_ray.evaluate.run import Evaluation, print_table, run_evaluation, written
from mars_ray.evaluate.tasks import problems_of
from mars_ray.files import ResultCache, write_whole
from mars_ray.model.draft_adapter import read_draft_adapter, read_draft_card, write_draft_adapter
from mars_ray.progress import short
from mars_ray.serve.deploy import start
from mars_ray.train.draft_adapter import untrained_adapter
from mars_ray.train.plan import absolute_path
from mars_ray.train.run import run_training

_VERIFIED = VerifiedMode()
_VERIFIED_LABEL = mode_label(_VERIFIED.model_dump())
_ANSWER_S = 60.0
# Differs from the evaluation's seed.
_QUESTION_SEED = 20_260
_ANSWER_TOKENS = 128


class _Demo:
    """A job whose prompts have been found, with the paths of its files."""

    def __init__(self, job: DemoJob, console: Console) -> None:
        prompts = FilesSource(paths=(absolute_path(str(found(job.prompts))),))
        # How speeds are measured: of the adapter that is served, and of no other.
        self.speeds = job.adapt.measure.model_copy(update={"kinds": {"everyday": prompts}})
        untimed = self.speeds.model_copy(update={"batch_sizes": ()})
        self.adapt = job.adapt.model_copy(update={"measure": untimed})
        self.places = Places(Path(absolute_path(self.adapt.directory)))
        self.shipped: Path | None = None
        if job.shipped:
            shipped = Path(absolute_path(job.shipped))
            if shipped.exists():
                self.shipped = shipped
            else:
                console.print(f"no {job.shipped} here: without an adapter of longer training")
        self.console = console

    def evaluate_job(self, adapter: Path, modes: tuple[Mode, ...], directory: Path) -> EvaluateJob:
        """The job that measures an adapter on the demo's prompts."""
        measure = self.adapt.measure
        return EvaluateJob(
            checkpoint=str(self.base),
            output_dir=str(directory),
            task=PromptsTask(kinds=measure.kinds),
            modes=modes,
            max_new_tokens=measure.max_new_tokens,
            engine=measure.engine.model_copy(update={"draft_adapter": str(adapter)}),
        )

    @cached_property
    def base(self) -> Path:
        """Directory of the model, which exists once the adaptation has run."""
        return base_model(self.adapt, self.places)


def run_demo(job: DemoJob, console: Console, connect: Connect = already) -> dict[str, Any]:
    """Adapt, measure, serve and ask, on the cluster to which `connect` connects.

    Returns the line that the command prints last. Raises MarsError.
    """
    started = time.perf_counter()
    demo = _Demo(job, console)
    if demo.shipped:
        read_draft_card(demo.shipped)
    adapted = run_adaptation(demo.adapt, console, connect)
    console.rule("an untrained adapter, for comparison")
    untrained = _untrained(demo)
    console.rule("after longer training" if demo.shipped else "all modes")
    adapter = demo.shipped or demo.places.adapter
    directory = _directory(demo, adapter)
    evaluate = demo.evaluate_job(adapter, job.modes, directory)
    frontier = written(evaluate) or run_evaluation(evaluate, console).frontier
    print_table(Evaluation(frontier, directory), console)
    work = [each.model_dump(mode="json") for each in (evaluate, demo.speeds)]
    work.append(asdict(read_draft_card(adapter)))
    kept = ResultCache(directory / "beside.jsonl", json.dumps(work))
    answers = decode_beside(evaluate, (_VERIFIED,), kept, console)
    share = identical(answers[_VERIFIED_LABEL], answers[TRANSFORMERS])
    prompts = len(answers[TRANSFORMERS])
    console.print(
        f"{_VERIFIED_LABEL}: {share:.1%} of {prompts} answers are transformers', token for token, "
        f"in {evaluate.engine.dtype}"
    )
    speeds = _speeds(demo, adapter, kept)
    serve = service_table(demo.adapt, demo.base, demo.places)
    serve["engine"]["draft_adapter"] = str(adapter)
    service = directory / "serve.toml"
    service.write_bytes(tomli_w.dumps(serve).encode())
    commands = [f"mars-ray serve {short(service)}", "mars-ray chat"]
    page = adaptation(demo.adapt, adapter, frontier, speeds, [], commands)
    write_report(page, directory / "report.html")
    console.rule("serving and asking")
    url = start(ServeJob.model_validate(serve))
    answer = ask(url, job.question, job.answer_tokens, console)
    console.print(f"plot: {short(directory / 'frontier.png')}", soft_wrap=True)
    console.print(f"report: {short(directory / 'report.html')}", soft_wrap=True)
    console.print(
        f"serve it: mars-ray serve {short(directory / 'serve.toml')}, and its page is {url}/",
        soft_wrap=True,
    )
    console.rule("how fast: the same answers by exact and verified, in turn")
    for speed in speeds:
        console.print(speed.line, highlight=False, soft_wrap=True)
    trained_here = read_frontier(demo.places.adapter)
    return {
        "identical": share,
        "prompts": prompts,
        "dtype": demo.adapt.measure.engine.dtype,
        "tokens_per_forward": {
            "untrained": _tokens_per_forward(untrained),
            "trained_here": _tokens_per_forward(trained_here),
            "shipped": _tokens_per_forward(frontier) if demo.shipped else None,
        },
        "speed": {speed.batch: _summary(speed) for speed in speeds},
        "http_ok": bool(answer),
        "train_s": round(adapted["training"]["seconds"], 1),
        "total_s": round(time.perf_counter() - started, 1),
    }


def _tokens_per_forward(frontier: Frontier) -> float:
    return round(frontier.point(_VERIFIED_LABEL).tokens_per_forward, 3)


def _summary(speed: Speed) -> dict[str, Any]:
    if speed.fault:
        return {"not_measured": speed.fault}
    return {
        "exact_tokens_per_s": [round(rate, 1) for rate in speed.exact],
        "verified_tokens_per_s": [round(rate, 1) for rate in speed.drafts],
        "verified_over_exact": [round(ratio, 3) for ratio in speed.ratios],
        "tokens_per_forward": round(speed.tokens_per_forward, 3),
    }


def _untrained(demo: _Demo) -> Frontier:
    """The frontier of an untrained adapter: it drafts next to nothing."""
    recipe, directory = demo.adapt.recipe, demo.places.root / "untrained"
    if not directory.exists():
        depths = recipe.objective.max_block_size
        write_draft_adapter(directory, untrained_adapter(demo.base, recipe.adapter, depths))
    evaluate = demo.evaluate_job(directory, (_VERIFIED,), directory)
    frontier = written(evaluate) or run_evaluation(evaluate, demo.console).frontier
    print_table(Evaluation(frontier, directory), demo.console)
    return frontier


def _directory(demo: _Demo, adapter: Path) -> Path:
    """The directory for measurements with an adapter; those with another adapter are deleted."""
    read_draft_adapter(adapter, demo.base)  # refuses another model's adapter now
    directory = demo.places.root / ("shipped" if demo.shipped else "trained_here")
    card, known = json.dumps(asdict(read_draft_card(adapter))), directory / "of.json"
    if not known.exists() or known.read_text("utf-8") != card:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        write_whole(known, card)
    return directory


def _speeds(demo: _Demo, adapter: Path, kept: ResultCache) -> list[Speed]:
    """The speeds of an adapter, measured unless they are kept. Those with a fault are not kept, so
    that the next run measures again."""
    if "speeds" in kept:
        return [Speed(**row) for row in kept["speeds"]]
    asked = problems_of(PromptsTask(kinds=demo.adapt.measure.kinds))
    speeds = measure_speeds(demo.base, adapter, asked, demo.speeds, demo.console, one_text=True)
    if all(speed.fault is None for speed in speeds):
        kept["speeds"] = [asdict(speed) for speed in speeds]
    return speeds


def run_tiny_demo(job: TinyDemoJob, console: Console, connect: Connect = already) -> dict[str, Any]:
    """Train, evaluate before and after MARS, serve and ask, on the cluster to which `connect`
    connects.

    Returns the line that the command prints last. Raises MarsError.
    """
    started = time.perf_counter()
    console.rule("training: AR, then MARS")
    trained = run_training(job.train, connect)
    before_dir, after_dir = list(trained.models.values())[-2:]
    console.rule("measuring: exact before MARS, all modes after")
    before = run_evaluation(_exact_only(job, before_dir), console).frontier
    evaluate = job.evaluate.model_copy(update={"checkpoint": short(after_dir)})
    evaluation = run_evaluation(evaluate, console)
    after = evaluation.frontier
    print_table(evaluation, console)
    console.rule("serving and asking")
    serve = job.serve.model_copy(update={"checkpoint": str(after_dir)})
    question = problems("test", 1, _QUESTION_SEED)[0].question
    connect()
    answer = ask(start(serve), question, _ANSWER_TOKENS, console)
    command = f"mars-ray serve {short(after_dir)} model_name={serve.name}"
    console.print(f"serve it: {command}", soft_wrap=True)
    console.print(f"plot: {short(evaluation.plot)}", soft_wrap=True)
    exact, confidence = after.points[0], after.point("confidence 0.95")
    verified = after.point("verified 1")
    return {
        "exact_accuracy_before": before.points[0].accuracy,
        "exact_accuracy": exact.accuracy,
        "confidence_0.95": {
            "accuracy": confidence.accuracy,
            "tokens_per_forward": round(confidence.tokens_per_forward, 3),
        },
        "verified": {
            "accuracy": verified.accuracy,
            "tokens_per_forward": round(verified.tokens_per_forward, 3),
            "identical": verified.identical,
        },
        "http_ok": bool(answer),
        "train_s": round(sum(trained.seconds.values()), 1),
        "total_s": round(time.perf_counter() - started, 1),
    }


def _exact_only(job: TinyDemoJob, checkpoint: Path) -> EvaluateJob:
    # Written beside its own model: in the job's directory it would replace the existing frontier.
    changes = {"checkpoint": short(checkpoint), "modes": (ExactMode(),), "output_dir": None}
    return job.evaluate.model_copy(update=changes)


def ask(url: str, question: str, max_tokens: int, console: Console) -> str:
    """Ask greedily, show question, answer and usage, and return the answer's text. Raises
    OSError."""
    with urlopen(Request(f"{url}/v1/models"), _ANSWER_S) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    request = Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, _ANSWER_S) as reply:
        answer = json.load(reply)
    text = answer["choices"][0]["message"]["content"]
    console.print(f"[bold]question[/] {question}\n[bold]answer[/]   {text}")
    console.print(f"[bold]usage[/]    {json.dumps(answer['usage'])}")
    return text
