"""The tiny demo: from random weights to an answer over HTTP."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from mars_ray.cluster.connection import Connect, already
from mars_ray.config.demo import TinyDemoJob
from mars_ray.config.modes import ExactMode
from mars_ray.core.frontier import Frontier
from mars_ray.data.corpus import problems
from mars_ray.demo.asking import ask
from mars_ray.evaluate.report import print_table
from mars_ray.evaluate.run import run_evaluation
from mars_ray.progress import short
from mars_ray.serve.deploy import start
from mars_ray.train.run import run_training

# Differs from the evaluation's seed.
_QUESTION_SEED = 20_260
_ANSWER_TOKENS = 128


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
    before = run_evaluation(_exact_only(job, before_dir), console)
    evaluate = job.evaluate.model_copy(update={"checkpoint": short(after_dir)})
    after = run_evaluation(evaluate, console)
    print_table(after, console)
    console.rule("serving and asking")
    serve = job.serve.model_copy(update={"checkpoint": str(after_dir)})
    question = problems("test", 1, _QUESTION_SEED)[0].question
    connect()
    answer = ask(start(serve), question, _ANSWER_TOKENS, console)
    command = f"mars-ray serve {short(after_dir)} model_name={serve.name}"
    console.print(f"serve it: {command}", soft_wrap=True)
    console.print(f"plot: {short(after.plot)}", soft_wrap=True)
    return _summary(before.frontier, after.frontier) | {
        "http_ok": bool(answer),
        "train_s": round(sum(trained.seconds.values()), 1),
        "total_s": round(time.perf_counter() - started, 1),
    }


def _exact_only(job: TinyDemoJob, checkpoint: Path) -> Any:
    # Written beside its own model: in the job's directory it would replace the existing frontier.
    changes = {"checkpoint": short(checkpoint), "modes": (ExactMode(),), "output_dir": None}
    return job.evaluate.model_copy(update=changes)


def _summary(before: Frontier, after: Frontier) -> dict[str, Any]:
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
    }
