"""The demo: makes any model faster with unchanged answers, from a package to a reply over HTTP.

An adapter is trained for some minutes, then one that was trained for hours takes its place. Besides
the files of the adaptation (`adapt.run`) it writes:

    output_dir/untrained/    the untrained adapter, with frontier.json
    output_dir/shipped/      measurements with the adapter that comes with the package, its serve
                             job and its page; trained_here/ if there is none

When run again, it resumes.
"""

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from mars_ray.adapt.jobs import Places, service_table
from mars_ray.adapt.report import Speed, write_report
from mars_ray.adapt.run import adaptation, base_model, run_adaptation
from mars_ray.cluster.port import check_port
from mars_ray.config.adapt import AdaptJob
from mars_ray.config.data import FilesSource
from mars_ray.config.demo import DemoJob
from mars_ray.config.evaluate import EvaluateJob, PromptsTask
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.config.serve import ServeJob
from mars_ray.config.shipped import found
from mars_ray.core.frontier import Frontier, mode_label, read_frontier
from mars_ray.demo.asking import ask
from mars_ray.errors import CheckpointError
from mars_ray.evaluate.beside import TRANSFORMERS, Decoded, decode_beside
from mars_ray.evaluate.report import print_table
from mars_ray.evaluate.run import Evaluation, is_whole, run_evaluation
from mars_ray.files import Kept, write_whole
from mars_ray.model.draft_adapter import read_draft_adapter, read_draft_card, write_draft_adapter
from mars_ray.progress import short
from mars_ray.serve.deploy import start
from mars_ray.train.draft_adapter import untrained_adapter
from mars_ray.train.plan import absolute_path

_EXACT, _VERIFIED = ExactMode(), VerifiedMode()
_EXACT_LABEL, _VERIFIED_LABEL = (mode_label(mode.model_dump()) for mode in (_EXACT, _VERIFIED))


@dataclass(frozen=True, slots=True)
class _Demo:
    """A job whose prompts have been found, with the paths of its files."""

    job: DemoJob
    adapt: AdaptJob
    places: Places
    shipped: Path | None
    console: Console

    @classmethod
    def of(cls, job: DemoJob, console: Console) -> "_Demo":
        prompts = FilesSource(paths=(absolute_path(str(found(job.prompts))),))
        measure = job.adapt.measure.model_copy(update={"kinds": {"everyday": prompts}})
        adapt = job.adapt.model_copy(update={"measure": measure})
        shipped = None
        if job.shipped:
            shipped = Path(absolute_path(str(found(job.shipped))))
            if not shipped.exists():
                console.print(f"no {job.shipped} here: without an adapter of hours of training")
                shipped = None
        return cls(job, adapt, Places(Path(absolute_path(adapt.directory))), shipped, console)

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

    @property
    def base(self) -> Path:
        """Directory of the model, which exists once the adaptation has run."""
        return base_model(self.adapt, self.places)


def run_demo(job: DemoJob, console: Console) -> dict[str, Any]:
    """Adapt, measure, serve and ask. Ray must be connected.

    Returns the line that the command prints last. Raises MarsError.
    """
    started = time.perf_counter()
    demo = _Demo.of(job, console)
    # Checked now, so that it does not fail after ten minutes.
    check_port(ServeJob.model_fields["host"].default, demo.adapt.service.port)
    if demo.shipped:
        read_draft_card(demo.shipped)
    adapted = run_adaptation(demo.adapt, console)
    console.rule("before training")
    untrained = _untrained(demo)
    console.rule("after hours of training" if demo.shipped else "all modes")
    adapter = demo.shipped or demo.places.adapter
    directory = _directory(demo, adapter)
    evaluate = demo.evaluate_job(adapter, job.modes, directory)
    frontier = _frontier(evaluate, console)
    print_table(Evaluation(frontier, directory), console)
    beside = _beside(evaluate, adapter, console)
    _print_beside(demo, beside)
    serve = _write_service(demo, adapter, frontier, beside, directory)
    console.rule("serving and asking")
    url = start(ServeJob.model_validate(serve))
    answer = ask(url, job.question, job.answer_tokens, console)
    _print_next(directory, url, console)
    trained_here = read_frontier(demo.places.adapter)
    return {
        "identical": beside[_VERIFIED_LABEL].identical(beside[TRANSFORMERS]),
        "prompts": len(beside[TRANSFORMERS].tokens),
        "dtype": demo.adapt.measure.engine.dtype,
        "tokens_per_forward": {
            "untrained": _tokens_per_forward(untrained),
            "trained_here": _tokens_per_forward(trained_here),
            "shipped": _tokens_per_forward(frontier) if demo.shipped else None,
        },
        "tokens_per_s": {
            "transformers": round(beside[TRANSFORMERS].tokens_per_s, 1),
            "exact": round(beside[_EXACT_LABEL].tokens_per_s, 1),
            "verified": round(beside[_VERIFIED_LABEL].tokens_per_s, 1),
        },
        "http_ok": bool(answer),
        "train_s": round(adapted["training"]["seconds"], 1),
        "total_s": round(time.perf_counter() - started, 1),
    }


def _tokens_per_forward(frontier: Frontier) -> float:
    return round(frontier.point(_VERIFIED_LABEL).tokens_per_forward, 3)


def _untrained(demo: _Demo) -> Frontier:
    """The frontier of an untrained adapter, measured like those of the trained ones."""
    recipe, directory = demo.adapt.recipe, demo.places.root / "untrained"
    if not directory.exists():
        depths = recipe.objective.max_block_size
        write_draft_adapter(directory, untrained_adapter(demo.base, recipe.adapter, depths))
    evaluate = demo.evaluate_job(directory, (_VERIFIED,), directory)
    frontier = _frontier(evaluate, demo.console)
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


def _frontier(job: EvaluateJob, console: Console) -> Frontier:
    """The frontier of the job, measured unless it exists already."""
    assert job.output_dir is not None
    try:
        known = read_frontier(job.output_dir)
    except CheckpointError:
        known = None
    if known and is_whole(known) and known.provenance["job"] == job.model_dump(mode="json"):
        return known
    return run_evaluation(job, console).frontier


def _beside(evaluate: EvaluateJob, adapter: Path, console: Console) -> dict[str, Decoded]:
    """Answers of our modes and of transformers. Our modes run under window control, as in a
    service, while the frontier's T/F is measured with all masks."""
    assert evaluate.output_dir is not None
    work = json.dumps([evaluate.model_dump(mode="json"), asdict(read_draft_card(adapter))])
    kept = Kept(Path(evaluate.output_dir) / "beside.jsonl", work)
    return decode_beside(evaluate, (_EXACT, _VERIFIED), kept, console)


def _print_beside(demo: _Demo, beside: dict[str, Decoded]) -> None:
    engine, peer = demo.adapt.measure.engine, beside[TRANSFORMERS]
    for label, decoded in beside.items():
        demo.console.print(
            f"{label}: {decoded.tokens_per_s:.0f} tokens/s at batch {engine.max_batch}, "
            f"{engine.dtype}; {decoded.identical(peer):.1%} of {len(peer.tokens)} answers are "
            "transformers'"
        )


def _write_service(
    demo: _Demo,
    adapter: Path,
    frontier: Frontier,
    beside: dict[str, Decoded],
    directory: Path,
) -> dict[str, Any]:
    """Write the serve job of an adapter and its report; returns the job."""
    table = service_table(demo.adapt, demo.base, demo.places)
    table["engine"]["draft_adapter"] = str(adapter)
    service = directory / "serve.toml"
    service.write_bytes(tomli_w.dumps(table).encode())
    exact, verified = (beside[label].tokens_per_s for label in (_EXACT_LABEL, _VERIFIED_LABEL))
    speed = Speed(demo.adapt.measure.engine.max_batch, exact, verified, verified / exact)
    commands = [f"mars-ray serve {short(service)}", "mars-ray chat"]
    page = adaptation(demo.adapt, adapter, frontier, [speed], [], commands)
    write_report(page, directory / "report.html")
    return table


def _print_next(directory: Path, url: str, console: Console) -> None:
    console.print(f"plot: {short(directory / 'frontier.png')}", soft_wrap=True)
    console.print(f"report: {short(directory / 'report.html')}", soft_wrap=True)
    console.print(
        f"serve it: mars-ray serve {short(directory / 'serve.toml')}, and its page is {url}/",
        soft_wrap=True,
    )
