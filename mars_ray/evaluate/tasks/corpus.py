"""Held-out problems of the built-in corpus."""

from mars_ray.config.evaluate import CorpusTask
from mars_ray.data.corpus import problems
from mars_ray.evaluate.tasks.base import Problem


def corpus_problems(task: CorpusTask) -> list[Problem]:
    """Problems of the test split, whose texts no training problem has."""
    return [
        Problem(item.question, str(item.answer)) for item in problems("test", task.count, task.seed)
    ]
