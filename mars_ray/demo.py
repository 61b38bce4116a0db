"""The demo: everything put together, from random weights to an answer over HTTP."""

import json
import time
from pathlib import Path
from typing import Any
from urllib.request import Request

from rich.console import Console

from mars_ray.cluster.direct import urlopen
from mars_ray.config.decode import ExactMode
from mars_ray.config.demo import DemoJob
from mars_ray.core.frontier import Frontier
from mars_ray.data.corpus import problems
from mars_ray.evaluate.report import print_table
from mars_ray.evaluate.run import run_evaluation
from mars_ray.serve.build import check_port, start
from mars_ray.train.run import run_training

# Another seed than the evaluation's.
_QUESTION_SEED = 20_260
_ANSWER_S = 60.0


def run_demo(job: DemoJob, console: Console) -> dict[str, Any]:
    """Train, evaluate before and after MARS, serve and ask. Ray must be connected.

    Returns the line that the command prints last. Raises MarsError.
    """
    # Not after ten minutes.
    check_port(job.serve.host, job.serve.port)
    started = time.perf_counter()
    console.rule("training: AR, then MARS")
    trained = run_training(job.train)
    before_dir, after_dir = list(trained.models.values())[-2:]
    console.rule("measuring: exact before MARS, all modes after")
    before = run_evaluation(_exact_only(job, before_dir), console)
    evaluate = job.evaluate.model_copy(update={"checkpoint": _short(after_dir)})
    after = run_evaluation(evaluate, console)
    print_table(after, console)
    console.rule("serving and asking")
    serve = job.serve.model_copy(update={"checkpoint": str(after_dir)})
    answer = _ask(start(serve), console)
    command = f"mars-ray serve {_short(after_dir)} model_name={serve.name}"
    console.print(f"serve it: {command}", soft_wrap=True)
    console.print(f"plot: {_short(after.plot)}", soft_wrap=True)
    return _summary(before.frontier, after.frontier) | {
        "http_ok": bool(answer),
        "train_s": round(sum(trained.seconds.values()), 1),
        "total_s": round(time.perf_counter() - started, 1),
    }


def _exact_only(job: DemoJob, checkpoint: Path) -> Any:
    # Beside its own model: in the job's directory it would take the place of what is there.
    changes = {"checkpoint": _short(checkpoint), "modes": (ExactMode(),), "output_dir": None}
    return job.evaluate.model_copy(update=changes)


def _ask(url: str, console: Console) -> str:
    """Ask a held-out question over HTTP; the answer's text."""
    question = problems("test", 1, _QUESTION_SEED)[0].question
    body = {
        "model": _first_model(url),
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 128,
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


def _first_model(url: str) -> str:
    with urlopen(Request(f"{url}/v1/models"), _ANSWER_S) as reply:
        return json.load(reply)["data"][0]["id"]


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


def _short(path: Path) -> str:
    """Relative to where the command runs, if it lies below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
