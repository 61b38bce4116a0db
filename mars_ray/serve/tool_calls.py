"""Takes the calls of tools out of an answer's text; `serve/formats.py` says how they look."""

import json

from mars_ray.serve.formats import CALL_BEGIN, CALL_END
from mars_ray.serve.messages import ToolCall


class ToolCallReader:
    """For one answer. White space around calls belongs to them."""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id
        self._held = ""
        self.count = 0

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The text that is safe to pass on, and the calls that this text completes."""
        self._held += text
        said, calls = "", []
        while (begin := self._held.find(CALL_BEGIN)) >= 0:
            end = self._held.find(CALL_END, begin)
            if end < 0:
                break
            call = self._read(self._held[begin + len(CALL_BEGIN) : end])
            end += len(CALL_END)
            # What is no call after all is text.
            said += self._held[:end] if call is None else self._held[:begin].rstrip()
            calls += [] if call is None else [call]
            self._held = self._held[end:]
        cut = self._undecided() if begin < 0 else len(self._held[:begin].rstrip())
        said, self._held = said + self._held[:cut], self._held[cut:]
        return said, tuple(calls)

    def flush(self) -> str:
        """What was held back: no call came of it."""
        text, self._held = self._held, ""
        return "" if self.count and not text.strip() else text

    def _read(self, text: str) -> ToolCall | None:
        try:
            call = json.loads(text)
        except json.JSONDecodeError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        self.count += 1
        arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
        return ToolCall(f"call_{self._id}_{self.count}", call["name"], arguments)

    def _undecided(self) -> int:
        """Where the end begins that may yet become a call, or the space before one."""
        for length in range(min(len(CALL_BEGIN) - 1, len(self._held)), 0, -1):
            if CALL_BEGIN.startswith(self._held[-length:]):
                return len(self._held[:-length].rstrip())
        return len(self._held.rstrip())
