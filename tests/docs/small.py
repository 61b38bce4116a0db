"""What makes the jobs of the documentation small enough to be executed, by the job's file."""

import re
import shlex

_MODEL = ("model={type='preset', preset='tiny', vocab_size=400}", "log_every_steps=1")
_SIMULATE = ("policies=['mars', 'fixed']", "seeds=[0]", "scaling.max_replicas=4")
_ONE_CELL = ("slos={short={ttft_s=2, time_per_token_s=0.015}}", "cold_starts_s=[5]")
_STAGE = {"epochs": 1, "global_batch_size": 4, "micro_batch_size": 2}


def _for_gpus(*stages: str) -> tuple[str, ...]:
    """One worker without a GPU, and a model that it has room for."""
    data = "data.train={type='corpus', count=20}"
    short = [f"stages.{stage}.{key}={value}" for stage in stages for key, value in _STAGE.items()]
    return (*_MODEL, data, "precision=float32", "cluster={workers=1}", *short)


def _crowds(*traces: str) -> tuple[str, ...]:
    """A minute, with a crowd in its middle."""
    short = {"from_s": 20, "to_s": 40, "duration_s": 60}
    return tuple(f"traces.{name}.{key}={value}" for name in traces for key, value in short.items())


SMALL: dict[str, tuple[str, ...]] = {
    "demo": (
        *("adapt.model=models/plain", "shipped=adapters/none", "answer_tokens=8"),
        *("adapt.minutes=0.2", "adapt.answers.prompts=[{type='corpus', count=60}]"),
        *("adapt.answers.max_new_tokens=16", "adapt.recipe.held_out=4"),
        *("adapt.measure.max_new_tokens=8", "adapt.measure.speed_prompts=1"),
        *("adapt.service.engine.max_context=512", "adapt.service.port=8000"),
    ),
    "demo-tiny": (
        *("train.data.train.count=400", "train.data.eval.count=16"),
        *("train.stages.ar.steps=4", "train.stages.mars.steps=4"),
        *("evaluate.task.count=4", "evaluate.max_new_tokens=8", "serve.port=8000"),
    ),
    "serve-demo": ("port=8000",),
    "serve-qwen2.5-7b": (
        *("gpus_per_replica=0", "cpus_per_replica=1"),
        "engine={max_batch=8, max_context=256}",
    ),
    "train-gsm8k": (*_MODEL, "stages.ar.steps=3", "stages.mars.steps=3"),
    "train-qwen2.5-0.5b": _for_gpus("ar", "mars"),
    "train-qwen2.5-0.5b-control": _for_gpus("ar", "more-ar"),
    "train-qwen2.5-0.5b-no-sft-loss": _for_gpus("ar", "mars"),
    "train-qwen2.5-7b": _for_gpus("ar", "mars"),
    "train-qwen2.5-32b": _for_gpus("ar", "mars"),
    "tune-demo": (
        *("trials=2", "scheduler={type='none'}", "train.data.train.count=200"),
        *("train.stages.mars.steps=4", "train.stages.mars.eval_every_steps=2"),
        *("train.stages.mars.eval_rows=8", "train.checkpoint.every_steps=2"),
        *(
            "objectives.task.count=4",
            "objectives.modes=['verified']",
            "objectives.max_new_tokens=8",
        ),
    ),
    "tune-gsm8k": (),
    "generate-smollm2": (
        *("prompts.limit=24", "max_new_tokens=32"),
        "engine={max_batch=4, max_context=256, threads=1}",
    ),
    "train-smollm2": (
        *("stages.mars.steps=60", "data.max_length=128", "data.packing=false"),
        "checkpoint.every_steps=2",
    ),
    "tune-smollm2": (
        *("trials=2", "train.data.max_length=128", "train.data.packing=false"),
        *("objectives.task.count=2", "objectives.max_new_tokens=8"),
        "objectives.engine={max_batch=4, max_context=256, threads=1}",
    ),
    "evaluate-smollm2": (),
    "generate-demo": ("prompts.count=8", "max_new_tokens=8"),
    "evaluate-gsm8k": ("task.count=4", "modes=[{type='verified'}]", "max_new_tokens=8"),
    "bench-demo": (
        *("modes=[{type='exact'}]", "batch_sizes=[1]", "prompts=1", "rounds=1"),
        *("max_new_tokens=4", "transformers=false"),
    ),
    "simulate-overloads": (*_SIMULATE, *_ONE_CELL, *_crowds("flash", "tenfold", "kills")),
    "simulate-demo": (*_SIMULATE, *_crowds("flash"), "traces.sine.duration_s=60"),
    "export-demo": (),
}


def small(command: str, *more: str) -> str:
    """The command with its job's settings behind it, but for those that it has, and others."""
    job = re.search(r" (?:jobs|benchmarks/policies)/(\S+)\.toml", command)
    settings = SMALL[job[1]] if job else ()
    added = [setting for setting in settings if f"{setting.partition('=')[0]}=" not in command]
    return f"{command} {shlex.join((*added, *more))}"
