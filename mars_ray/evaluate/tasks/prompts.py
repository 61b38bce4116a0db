"""Prompts of files, by kind, without reference answers."""

from itertools import zip_longest

from mars_ray.config.data import FilesSource
from mars_ray.config.evaluate import PromptsTask
from mars_ray.data.sources import BadRows, read_prompts
from mars_ray.evaluate.tasks.base import Problem


def prompts_problems(task: PromptsTask) -> list[Problem]:
    """All prompts of all kinds, one kind after the other. Raises DataError for a bad row."""
    return [problem for kind, source in task.kinds.items() for problem in _problems(kind, source)]


def kinds_in_turn(problems: list[Problem]) -> list[Problem]:
    """The first problem of every kind, the second of every kind, and so on: so the first few are of
    all kinds."""
    by_kind: dict[str | None, list[Problem]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, []).append(problem)
    return [problem for each in zip_longest(*by_kind.values()) for problem in each if problem]


def _problems(kind: str, source: FilesSource) -> list[Problem]:
    report = BadRows()
    problems = [
        Problem(record.messages[-1].content, None, kind, record.messages)
        for record in read_prompts(source, report)
    ]
    report.check(0.0)
    return problems
