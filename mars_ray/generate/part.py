"""The journal of a generation: a file that is only appended to, and read to resume.

first line   what the generation is made from
other lines  in order of arrival: an answer with its prompt's number, a try to write a prompt, or
             the working time of the engines
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_ray.errors import DataError
from mars_ray.files import append, changed_keys, read_journal
from mars_ray.generate.own_prompts import Try

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to a prompt."""

    tokens: "array[int]"  # compact, because there may be many
    finish_reason: str
    forwards: int


class Part:
    """The file and its content: answers by the number of their prompt, tries by the index of their
    source in the job and their own number."""

    def __init__(self, path: Path, made_from: Line) -> None:
        """Raises DataError if the file belongs to another job or is inconsistent."""
        self.path = path
        self.answers: dict[int, Answer] = {}
        self.tries: dict[int, dict[int, Try]] = {}
        self.seconds = 0.0  # working time of the engines over all runs so far
        lines = read_journal(path)
        if not lines:
            append(path, made_from)
        else:
            check_same(lines[0], made_from, path)
        for line in lines[1:]:
            self._take(line)

    def add_answers(self, answers: Mapping[int, Answer]) -> None:
        """Records answers by the number of their prompt."""
        self._append(
            {
                "prompt": number,
                "answer_ids": answer.tokens.tolist(),
                "finish_reason": answer.finish_reason,
                "forwards": answer.forwards,
            }
            for number, answer in answers.items()
        )

    def add_tries(self, place: int, tries: Mapping[int, Try]) -> None:
        """Records tries of a source by their number."""
        self._append(
            {"source": place, "try": number, "text": each.text, "fault": each.fault}
            for number, each in tries.items()
        )

    def add_seconds(self, seconds: float) -> None:
        """Records working time of the engines."""
        self._append([{"seconds": seconds}])

    def _append(self, lines: Iterable[Line]) -> None:
        new = list(lines)
        for line in new:
            self._take(line)
        append(self.path, *new)

    def _take(self, line: Line) -> None:
        if "seconds" in line:
            self.seconds += line["seconds"]
            return
        if "try" in line:
            number, content = line["try"], Try(line["text"], line["fault"])
            known: dict[int, Any] = self.tries.setdefault(line["source"], {})
        else:
            tokens = array("i", line["answer_ids"])
            content = Answer(tokens, line["finish_reason"], line["forwards"])
            known, number = self.answers, line["prompt"]
        if number in known:
            raise DataError(
                f"{self.path} has answers twice, as two processes leave them: delete it"
            )
        known[number] = content


def check_same(before: Any, now: Line, place: Path) -> None:
    """Raises DataError if the existing output was made from something else."""
    if not isinstance(before, dict) or not before.keys() >= now.keys():
        raise not_ours(place)
    changed = changed_keys(before["job"], now["job"])
    changed += [f"content of {key}" for key in changed_keys(before["content"], now["content"])]
    if changed:
        raise DataError(
            f"{place} was written by another job, with another {', '.join(changed)}: choose "
            "another output, or delete it"
        )


def not_ours(place: Path) -> DataError:
    """The error for a file at this place that is not of this job."""
    return DataError(f"{place} is there and is not of mars-ray generate: choose another output")
