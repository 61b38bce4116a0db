r"""Extracts tool calls from an answer's text; `serve/replica/formats.py` has their format.

    text  <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>  text
        [ opening                                   [ value  [ closing     )

An opening that is incomplete or continues differently is text, so it is held back until it is
whole. From then on it stays a call: its arguments are passed on as they come, and cannot be taken
back from the client. An answer that ends within them has a call with truncated arguments, as with
OpenAI.
"""

import re

from mars_ray.serve.protocol import ToolCallDelta
from mars_ray.serve.replica.formats import CALL_BEGIN, CALL_END

_SPACE = r"\s*+"


def _cut_anywhere(*parts: str) -> str:
    """A pattern of the parts in order, which also matches if the text ends after some of them."""
    pattern = parts[-1]
    for part in reversed(parts[:-1]):
        pattern = rf"{part}(?:\Z|{pattern})"
    return pattern


# White space around a call belongs to it. A run of it is scanned once, not from each position.
_OPENING = re.compile(
    rf"(?<!\s){_SPACE}(?:\Z|"
    + _cut_anywhere(
        *(*CALL_BEGIN, _SPACE, r"\{", _SPACE, *'"name"', _SPACE, ":", _SPACE),
        *('"', r"(?P<name>[a-zA-Z0-9_-]++)", '"', _SPACE),
        *(",", _SPACE, *'"arguments"', _SPACE, ":", _SPACE, r'(?P<value>["\[{\w-])'),
    )
    + ")"
)
_CLOSING = re.compile(_cut_anywhere(_SPACE, r"\}", _SPACE, *CALL_END))


class ToolCallReader:
    """Reads one answer. The result does not depend on how the text is cut into pieces."""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id
        self._held = ""
        self._value: _Value | None = None  # value of the call that is being read
        self.count = 0

    @property
    def is_cut(self) -> bool:
        """Whether the text, if it ended here, would end within a call's arguments."""
        return self._value is not None and not self._value.is_over

    def push(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """The text that is safe to pass on, and the additions to calls."""
        self._held += text
        said, calls = "", []
        while True:
            if self._value is None:
                new, begun = self._outside()
                said += new
                if begun is None:
                    return said, tuple(calls)
                calls.append(begun)
            if self.is_cut and (more := self._inside()):
                calls.append(more)
            if not self._ended():
                return said, tuple(calls)

    def flush(self) -> str:
        """The text held back, which has not become a call."""
        text, self._held = self._held, ""
        is_space = self.count > 0 and not text.strip()
        return "" if is_space or self._value else text

    def _outside(self) -> tuple[str, ToolCallDelta | None]:
        """The text up to the next opening, and the call if the opening is whole."""
        match = _OPENING.search(self._held)
        assert match, "at the end the pattern matches nothing at all"
        said = self._held[: match.start()]
        if match["value"] is None:
            self._held = match[0]
            return said, None
        self._held = self._held[match.start("value") :]
        self._value = _Value()
        begun = ToolCallDelta(
            self.count, id=f"call_{self._id}_{self.count + 1}", name=match["name"]
        )
        self.count += 1
        return said, begun

    def _inside(self) -> ToolCallDelta | None:
        """The new part of the call's arguments."""
        assert self._value
        length = self._value.push(self._held)
        more, self._held = self._held[:length], self._held[length:]
        return ToolCallDelta(self.count - 1, more) if more else None

    def _ended(self) -> bool:
        """Whether the call is over; anything but its closing is text again."""
        if self.is_cut:
            return False
        match = _CLOSING.match(self._held)
        if match and not match[0].endswith(CALL_END):
            return False
        self._held = self._held[match.end() :] if match else self._held
        self._value = None
        return True


class _Value:
    """Follows a JSON value to its end."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> int:
        """Number of the characters that belong to the value."""
        for place, character in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif self._depth == 0 and (character in ",}]" or character.isspace()):
                self.is_over = True  # a number or a word ends at the first other character
                return place
            else:
                self._in_string = character == '"'
                self._depth += (character in "{[") - (character in "}]")
            if not self._in_string and self._depth == 0 and character in '"}]':
                self.is_over = True
                return place + 1
        return len(text)
