"""An adaptation from end to end. When run again, it resumes.

output_dir/
  adapt.json                 the resolved job
  base/                      the model, if it was a GGUF file or a package
  answers.jsonl              its answers, to its own prompts or to given ones
  train.jsonl, held_out.jsonl
  training/                  the training job
  adapter/                   the draft adapter, with frontier.json and frontier.png
  speeds.json, serve.toml, report.html
"""

import json
import shutil
from dataclasses import asdict
from os.path import expanduser
from pathlib import Path
from typing import Any, Literal

import ray
import tomli_w
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from mars_ray.adapt.jobs import (
    STAGE,
    Devices,
    Places,
    Split,
    check_jobs,
    evaluate_job,
    generate_job,
    service_table,
    split,
    train_job,
)
from mars_ray.adapt.report import Adaptation, Speed, write_report
from mars_ray.adapt.speed import measure_speeds
from mars_ray.cluster.connection import NOT_STARTED, Connect, already
from mars_ray.config.adapt import AdaptJob
from mars_ray.core.frontier import Frontier, read_frontier
from mars_ray.errors import CheckpointError, ConfigError, MarsError
from mars_ray.evaluate.run import Evaluation, is_whole, print_table, run_evaluation
from mars_ray.evaluate.tasks import problems_of
from mars_ray.files import claim, sole_writer, write_whole
from mars_ray.generate.on_ray import RayEngines
from mars_ray.generate.run import run_generation
from mars_ray.importing import import_model
from mars_ray.model.directory import CONFIG_FILE
from mars_ray.model.draft_adapter import adapter_bytes, name_base, read_draft_card
from mars_ray.model.load import multiplies_bfloat16, read_config
from mars_ray.progress import short
from mars_ray.provenance import provenance
from mars_ray.train.plan import absolute_path
from mars_ray.train.run import begun, run_training


def devices() -> Devices:
    """One worker per GPU. Without GPUs: two workers on a single node, otherwise one per node.

    One engine per node or GPU writes answers: a CPU's engines would share its memory bandwidth.
    Raises ConfigError if no node is there to compute on.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [node["Resources"] for node in alive]
    working = [node for node in alive if node["Resources"].get("CPU", 0.0) >= 1]
    cpus = [node["Resources"]["CPU"] for node in working]
    gpus = int(sum(node.get("GPU", 0.0) for node in nodes))
    if gpus:
        having = [node for node in nodes if node.get("GPU", 0.0)]
        each = max(1.0, min(node.get("CPU", 0.0) // node["GPU"] for node in having))
        return Devices(gpus, each, 1.0, gpus, each, "bfloat16")
    if not cpus:
        raise ConfigError(NOT_STARTED)
    least = min(cpus)
    precision = _precision(working)
    if len(cpus) > 1:
        return Devices(len(cpus), least, 0.0, len(cpus), least, precision)
    workers = 2 if least >= 2 else 1
    return Devices(workers, least // workers, 0.0, 1, least, precision)


def _precision(nodes: list[dict[str, Any]]) -> Literal["float32", "bfloat16"]:
    """The faster precision of these nodes' CPUs, which may differ from this machine's."""
    asked = ray.remote(num_cpus=0)(multiplies_bfloat16)
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    said = ray.get([asked.options(scheduling_strategy=place).remote() for place in places])
    return "bfloat16" if all(said) else "float32"


_JOB_FILE = "adapt.json"
# Share of a job's minutes left to training, however long the answers took.
_LEAST_SHARE = 0.25


def run_adaptation(job: AdaptJob, console: Console, connect: Connect = already) -> dict[str, Any]:
    """Do the remaining work, on the cluster to which `connect` connects once the model is there.

    Returns the line that the command prints last. Raises MarsError.
    """
    places = Places(Path(absolute_path(job.directory)))
    with sole_writer(places.root, places.root / ".lock", "output_dir"):
        now = job.model_dump(mode="json")
        claim(places.root / _JOB_FILE, now, "an adaptation", "output_dir")
        console.rule("the model")
        base = base_model(job, places)
        connect()
        console.rule("its answers")
        try:
            found = devices()
            check_jobs(job, base, places, found)
            generated = run_generation(generate_job(job, base, places, found), console, RayEngines)
        except MarsError:
            # Refused before the first answer: a job with more minutes may begin here.
            if not any(path.exists() for path in (places.answers, places.part)):
                (places.root / _JOB_FILE).unlink()
            raise
        parts = split(places.answers, places.root, job.recipe.held_out)
        console.print(
            f"{generated.conversations} answers; {parts.train_rows} train, {parts.held_out_rows} "
            f"are held out, {parts.cut} loops were cut"
        )
        console.rule("training")
        metrics = _train(job, base, places, parts, found, generated.seconds)
        console.rule("measuring")
        frontier = _measure(job, base, places, parts, console)
        speeds = _speeds(job, base, places, parts, console)
        places.service.write_bytes(tomli_w.dumps(service_table(job, base, places)).encode())
        commands = [f"mars-ray serve {short(places.service)}", "mars-ray chat"]
        curve = _curve(places.training / "stages" / STAGE / "metrics.jsonl")
        page = adaptation(job, places.adapter, frontier, speeds, curve, commands)
        write_report(page, places.report)
        console.print(f"report: {short(places.report)}\nserve it: {commands[0]}", soft_wrap=True)
        return {
            "adapter": short(places.adapter),
            "serve": short(places.service),
            "report": short(places.report),
            "points": {
                point.label: {
                    "tokens_per_forward": round(point.tokens_per_forward, 3),
                    "identical": point.identical,
                }
                for point in frontier.points
            },
            "speed_over_exact": {
                speed.batch: None if speed.fault else [round(ratio, 3) for ratio in speed.ratios]
                for speed in speeds
            },
            "training": metrics,
        }


def base_model(job: AdaptJob, places: Places) -> Path:
    """The model directory that the job names, or one made from its file or package."""
    given = Path(expanduser(job.model))
    if (given / CONFIG_FILE).is_file():
        read_config(given)
        return given.absolute()
    return import_model(job.model, places.base, revision=job.revision)


def _train(
    job: AdaptJob, base: Path, places: Places, parts: Split, found: Devices, answers_s: float
) -> dict[str, float]:
    """Train the adapter and put it in its place; returns the last metrics of its training."""
    minutes = job.minutes
    if minutes is not None:
        minutes = max(minutes - answers_s / 60, _LEAST_SHARE * minutes)
    before = begun(places.training)
    trained = run_training(train_job(job, base, places, parts, found, minutes, before))
    if not places.adapter.exists():
        draft = places.adapter.with_name(".adapter")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(trained.models[STAGE], draft)
        name_base(draft, job.model)
        draft.replace(places.adapter)
    return trained.metrics[STAGE] | {"seconds": trained.seconds[STAGE]}


def _measure(job: AdaptJob, base: Path, places: Places, parts: Split, console: Console) -> Frontier:
    asked = evaluate_job(job, base, places, parts)
    try:
        known = read_frontier(places.adapter)
    except CheckpointError:
        known = None
    if known is None or not is_whole(known):
        known = run_evaluation(asked, console).frontier
    print_table(Evaluation(known, places.adapter), console)
    return known


def _speeds(
    job: AdaptJob, base: Path, places: Places, parts: Split, console: Console
) -> list[Speed]:
    if not places.measured.exists():
        problems = problems_of(evaluate_job(job, base, places, parts).task)
        speeds = measure_speeds(base, places.adapter, problems, job.measure, console)
        write_whole(places.measured, json.dumps([asdict(speed) for speed in speeds]))
    speeds = [Speed(**row) for row in json.loads(places.measured.read_text("utf-8"))]
    for speed in speeds:
        console.print(speed.line, highlight=False, soft_wrap=True)
    return speeds


def adaptation(
    job: AdaptJob,
    adapter: Path,
    frontier: Frontier,
    speeds: list[Speed],
    curve: list[tuple[float, float]],
    commands: list[str],
) -> Adaptation:
    """The content of the page about an adapter for the job's model."""
    return Adaptation(
        name=job.name,
        base=job.model,
        adapter=short(adapter),
        adapter_bytes=adapter_bytes(adapter),
        prompts=frontier.points[0].problems,
        trained_on=read_draft_card(adapter).training,
        curve=curve,
        modes=frontier.points,
        speeds=speeds,
        next_commands=commands,
        provenance=provenance(),
    )


def _curve(metrics_file: Path) -> list[tuple[float, float]]:
    """Mask tokens trained on and teacher-forced T/F at each evaluation."""
    curve, seen = [], 0.0
    for line in metrics_file.read_text("utf-8").splitlines():
        row = json.loads(line)
        seen = row.get("mask_tokens", seen)
        if row["kind"] == "eval":
            curve.append((seen, row["tokens_per_forward"]))
    return curve
