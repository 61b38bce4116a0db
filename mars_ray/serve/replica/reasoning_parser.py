"""Separates what a model thinks from its answer: <think> thoughts </think> answer.

Some chat templates write the opening mark, some models do; with a switch such as Qwen3's, the
template writes both marks, and there are no thoughts. So it is read off the end of the prompt where
an answer begins, and where that says nothing the parser of the job decides: with `deepseek_r1` the
answer begins with thoughts, marked or not; with `qwen3` only if it begins with the mark.
"""

import re
from typing import Literal

from mars_ray.config.serve import ReasoningParser

THINK, THINK_END = "<think>", "</think>"
# thoughts: the answer begins with them. marked: only if it begins with the mark.
Start = Literal["thoughts", "marked", "answer"]

# A run of white space is scanned once, not from each position.
_END = re.compile(r"(?<!\s)\s*+" + re.escape(THINK_END))


def start_of(prompt_end: str, parser: ReasoningParser) -> Start:
    """How answers begin behind such a prompt."""
    opened, closed = prompt_end.rfind(THINK), prompt_end.rfind(THINK_END)
    if opened != closed:
        return "thoughts" if opened > closed else "answer"
    return "thoughts" if parser == "deepseek_r1" else "marked"


class ReasoningReader:
    """Reads one answer. The result does not depend on how the text is cut into pieces.

    The marks, and the white space around them, belong to neither part.
    """

    def __init__(self, start: Start, mark_id: int, end_id: int) -> None:
        self._mark_id, self._end_id = mark_id, end_id
        self._part: Literal["begin", "lead", "thoughts", "gap", "answer"] = (
            "answer" if start == "answer" else "begin"
        )
        self._is_marked = start == "marked"
        self._held = ""
        self._ids: list[int] = []  # of tokens up to the end mark
        self._has_thoughts = False

    @property
    def tokens(self) -> int:
        """Number of the thoughts' tokens, without the marks."""
        if not self._has_thoughts:
            return 0
        begin = self._ids.index(self._mark_id) + 1 if self._mark_id in self._ids else 0
        return len(self._ids) - begin - (self._end_id in self._ids)

    def count(self, tokens: tuple[int, ...]) -> None:
        """Count tokens of the answer; in whatever order their text comes."""
        if self._end_id in self._ids:
            return
        end = tokens.index(self._end_id) + 1 if self._end_id in tokens else len(tokens)
        self._ids += tokens[:end]

    def push(self, text: str) -> tuple[str, str]:
        """The additions to the thoughts and to the answer that are safe to pass on."""
        self._held += text
        thoughts = ""
        if self._part == "begin":
            self._begin()
        if self._part == "lead":
            self._held = self._held.lstrip()
            self._part = "thoughts" if self._held else "lead"
        if self._part == "thoughts":
            thoughts = self._think()
        if self._part == "gap":
            self._held = self._held.lstrip()
            self._part = "answer" if self._held else "gap"
        if self._part != "answer":
            return thoughts, ""
        said, self._held = self._held, ""
        return thoughts, said

    def flush(self) -> tuple[str, str]:
        """The text held back, as thoughts and answer."""
        held, self._held = self._held, ""
        if self._part == "thoughts":
            return held.rstrip(), ""
        if self._part == "begin" and not self._is_marked:
            return held.strip(), ""
        return "", held

    def _begin(self) -> None:
        """Decides whether the text begins with thoughts."""
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held = text.removeprefix(THINK)
        elif THINK.startswith(text):
            return  # not decided; also if there is nothing yet
        elif self._is_marked:
            self._part = "answer"
            return
        self._part = "lead"
        self._has_thoughts = True

    def _think(self) -> str:
        """The thoughts up to their end, or to where it may begin."""
        match = _END.search(self._held)
        if match:
            thoughts, self._held = self._held[: match.start()], self._held[match.end() :]
            self._part = "gap"
            return thoughts
        cut = len(self._held) - _undecided(self._held)
        thoughts, self._held = self._held[:cut], self._held[cut:]
        return thoughts


def _undecided(text: str) -> int:
    """Length of the white space, and of the beginning of the end mark, that the text ends with."""
    mark = next((n for n in range(len(THINK_END) - 1, 0, -1) if text.endswith(THINK_END[:n])), 0)
    before = text[: len(text) - mark]
    return mark + len(before) - len(before.rstrip())
