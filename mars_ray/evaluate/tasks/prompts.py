"""Prompts of files, by kind, without reference answers."""

from mars_ray.config.data import FilesSource
from mars_ray.config.evaluate import PromptsTask
from mars_ray.data.sources import BadRows, read_prompts
from mars_ray.evaluate.tasks.base import Problem


def prompts_problems(task: PromptsTask) -> list[Problem]:
    """All prompts of all kinds, one kind after the other. Raises DataError for a bad row."""
    return [problem for kind, source in task.kinds.items() for problem in _problems(kind, source)]


def _problems(kind: str, source: FilesSource) -> list[Problem]:
    report = BadRows()
    problems = [
        Problem(record.messages[-1].content, None, kind, record.messages)
        for record in read_prompts(source, report)
    ]
    report.check(0.0)
    return problems
