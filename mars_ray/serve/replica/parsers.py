r"""How models write thoughts and calls of tools, and how both are read from an answer's text.

Thoughts are <think> thoughts </think> answer. Some chat templates write the opening mark, some
models do; with a switch such as Qwen3's, the template writes both marks, and there are no thoughts.
So it is read off the end of the prompt where an answer begins, and where that says nothing the
parser of the job decides: with `deepseek_r1` the answer begins with thoughts, marked or not; with
`qwen3` only if it begins with the mark.

Calls are of these forms, which `tool_parser` of a job names; `chat_format.py` has their grammar.

    hermes    <tool_call>\n{"name": "add", "arguments": {...}}\n</tool_call>     each call
    llama3    {"name": "add", "parameters": {...}}; {"name": ...}
    mistral   [TOOL_CALLS][{"name": "add", "arguments": {...}}, {"name": ...}]   v3 and v7
              [TOOL_CALLS]add[ARGS]{...}[TOOL_CALLS]...                          v11 and later

    text  <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>  text
        [ opening                                   [ value  [ closing     )

An opening that is incomplete or continues differently is text, so it is held back until it is
whole; so is one of a tool that there is not. From then on it stays a call: its arguments are passed
on as they come, and cannot be taken back from the client. An answer that ends within them has a
call with truncated arguments, as with OpenAI.
"""

import hashlib
import json
import re
import string
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mars_ray.config.serve import ReasoningParser, ToolParser
from mars_ray.serve.protocol import ToolCallDelta

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
            # Up to their end, or to where it may begin.
            if match := _END.search(self._held):
                thoughts, self._held = self._held[: match.start()], self._held[match.end() :]
                self._part = "gap"
            else:
                cut = len(self._held) - _undecided(self._held)
                thoughts, self._held = self._held[:cut], self._held[cut:]
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


def _undecided(text: str) -> int:
    """Length of the white space, and of the beginning of the end mark, that the text ends with."""
    mark = next((n for n in range(len(THINK_END) - 1, 0, -1) if text.endswith(THINK_END[:n])), 0)
    before = text[: len(text) - mark]
    return mark + len(before) - len(before.rstrip())


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text of an answer's calls: `begin before NAME between ARGUMENTS after`, each call, or
    with one `begin` for a list of them all."""

    parser: ToolParser
    begin: str  # a token of its own in most vocabularies; without one a call is known by its name
    before: str
    between: str
    after: str
    joint: str
    is_list: bool = False

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls, given as name and arguments."""
        bodies = [
            f"{self.before}{name}{self.between}{arguments}{self.after}" for name, arguments in calls
        ]
        if self.is_list:
            return f"{self.begin}[{self.joint.join(bodies)}]"
        return self.joint.join(self.begin + body for body in bodies)

    def description(self, tools: Sequence[dict[str, Any]]) -> str:
        """The system message for a model whose chat template has no tools."""
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = self.write([("NAME", "{...}")])
        return (
            f"You can call these functions, whose parameters are JSON schemas:\n{functions}\n"
            f"To call one, write this and nothing else, with its arguments as JSON:\n{example}"
        )


HERMES = ToolFormat(
    parser="hermes",
    begin="<tool_call>",
    before='\n{"name": "',
    between='", "arguments": ',
    after="}\n</tool_call>",
    joint="\n",
)
LLAMA3 = ToolFormat(
    parser="llama3",
    begin="",
    before='{"name": "',
    between='", "parameters": ',
    after="}",
    joint="; ",
)
MISTRAL = ToolFormat(
    parser="mistral",
    begin="[TOOL_CALLS]",
    before='{"name": "',
    between='", "arguments": ',
    after="}",
    joint=", ",
    is_list=True,
)
MISTRAL_ARGS = ToolFormat(
    parser="mistral", begin="[TOOL_CALLS]", before="", between="[ARGS]", after="", joint=""
)
# What calls consist of besides text, where the vocabulary has a token for it.
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


_SPACE = r"\s*+"
# Mistral's chat templates refuse ids of another form.
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_DIGITS = string.digits + string.ascii_letters


def _cut_anywhere(*parts: str) -> str:
    """A pattern of the parts in order, which also matches if the text ends after some of them."""
    pattern = parts[-1]
    for part in reversed(parts[:-1]):
        pattern = rf"{part}(?:\Z|{pattern})"
    return pattern


def _letters(text: str) -> list[str]:
    return [re.escape(letter) for letter in text]


def _opening(ways: Iterable[tuple[str, ...]]) -> re.Pattern[str]:
    """A pattern of the beginning of a call in any of these ways, up to its first argument.

    White space around a call belongs to it. A run of it is scanned once, not from each position.
    """
    numbered = (
        _cut_anywhere(*parts, rf'(?P<value_{number}>["\[{{\w-])').replace(_NAME, _name(number))
        for number, parts in enumerate(ways)
    )
    return re.compile(rf"(?<!\s){_SPACE}(?:\Z|{'|'.join(numbered)})")


_NAME = "NAME"


def _name(number: int) -> str:
    return rf"(?P<name_{number}>[a-zA-Z0-9_-]++)"


def _key(name: str) -> tuple[str, ...]:
    return (*_letters(f'"{name}"'), _SPACE, ":", _SPACE)


def _object(arguments: str, *before: str) -> tuple[str, ...]:
    """The beginning of an object with a name and arguments."""
    quoted = ('"', _NAME, '"', _SPACE, ",", _SPACE)
    return (r"\{", _SPACE, *before, *_key("name"), *quoted, *_key(arguments))


_TYPE = (*_key("type"), *_letters('"function"'), _SPACE, ",", _SPACE)
_MARK = (*_letters("[TOOL_CALLS]"), _SPACE)
_ARGS = (*_letters("[ARGS]"), _SPACE)
_CALL_ID = (*_letters("[CALL_ID]"), _SPACE, r"[a-zA-Z0-9]++", _SPACE)
# An object of a list may end with an id, and a comma or the list's end stands behind it.
_ITEM_ID = (",", _SPACE, *_key("id"), '"', r"[a-zA-Z0-9_-]++", '"', _SPACE)


@dataclass(frozen=True, slots=True)
class _Patterns:
    """How the calls of a format are found."""

    opening: re.Pattern[str]
    closing: re.Pattern[str]  # one of its groups has matched if it is whole
    following: re.Pattern[str] | None = None  # opening of a further object of a list


_PATTERNS = {
    HERMES: _Patterns(
        _opening([(*_letters("<tool_call>"), _SPACE, *_object("arguments"))]),
        re.compile(_cut_anywhere(_SPACE, r"\}", _SPACE, *_letters("</tool_call"), "(>)")),
    ),
    LLAMA3: _Patterns(
        _opening(
            (";?+", _SPACE, *_object(arguments, *before))
            for arguments in ("parameters", "arguments")
            for before in ((), _TYPE)
        ),
        re.compile(_cut_anywhere(_SPACE, r"(\})")),
    ),
    MISTRAL: _Patterns(
        _opening([(*_MARK, r"\[", _SPACE, *_object("arguments"))]),
        re.compile(
            rf"{_SPACE}(?:\Z|"
            + _cut_anywhere(r"\}", _SPACE, r"([\],])")
            + "|"
            + _cut_anywhere(*_ITEM_ID, r"\}", _SPACE, r"([\],])")
            + ")"
        ),
        _opening([_object("arguments")]),
    ),
    MISTRAL_ARGS: _Patterns(
        _opening([(*_MARK, _NAME, _SPACE, *_CALL_ID, *_ARGS), (*_MARK, _NAME, _SPACE, *_ARGS)]),
        re.compile("()"),
    ),
}


def short_id(call_id: str) -> str:
    """An id as Mistral's chat templates want them, made of any id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode()).digest()
    return "".join(_DIGITS[byte % len(_DIGITS)] for byte in digest[:9])


class ToolCallReader:
    """Reads one answer. The result does not depend on how the text is cut into pieces."""

    def __init__(self, answer_id: str, form: ToolFormat, names: Collection[str]) -> None:
        """`names` are those of the tools; nothing else can be called."""
        self._id = answer_id
        self._form = form
        self._patterns = _PATTERNS[form]
        self._names = names
        self._held = ""
        self._value: _Value | None = None  # value of the call that is being read
        self._is_in_list = False  # behind a comma
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
            if self._value is not None and not self._value.is_over:
                length = self._value.push(self._held)
                more, self._held = self._held[:length], self._held[length:]
                if more:
                    calls.append(ToolCallDelta(self.count - 1, more))
            if not self._ended():
                return said, tuple(calls)

    def flush(self) -> str:
        """The text held back, which has not become a call."""
        text, self._held = self._held, ""
        is_space = self.count > 0 and not text.strip()
        return "" if is_space or self._value else text

    def _outside(self) -> tuple[str, ToolCallDelta | None]:
        """The text up to the next opening, and the call if the opening is whole."""
        match, name = self._opening()
        said = self._held[: match.start()]
        if name is None:
            self._held = match[0]
            return said, None
        self._is_in_list = False
        self._held = self._held[match.end() - 1 :]  # from the value's first character on
        self._value = _Value()
        begun = ToolCallDelta(self.count, id=self._call_id(), name=name)
        self.count += 1
        return said, begun

    def _opening(self) -> tuple[re.Match[str], str | None]:
        """The next opening, and its name if it is whole."""
        following = self._patterns.following
        if self._is_in_list and following:
            match = following.search(self._held)
            name = match and _called(match)
            if match and match.start() == 0 and (name is None or name in self._names):
                return match, name
            self._is_in_list = False  # what else stands in the list is text
        start = 0
        while True:
            match = self._patterns.opening.search(self._held, start)
            assert match, "at the end the pattern matches nothing at all"
            name = _called(match)
            if name is None or name in self._names:
                return match, name
            start = match.end()

    def _call_id(self) -> str:
        name = f"call_{self._id}_{self.count + 1}"
        return short_id(name) if self._form.parser == "mistral" else name

    def _ended(self) -> bool:
        """Whether the call is over; anything but its closing is text again."""
        if self.is_cut:
            return False
        match = self._patterns.closing.match(self._held)
        if match and match.lastindex is None:
            return False
        if match:
            self._is_in_list = match[0].endswith(",")
            self._held = self._held[match.end() :]
        self._value = None
        return True


def _called(match: re.Match[str]) -> str | None:
    """The name of the call, if its opening is whole."""
    for group, value in match.groupdict().items():
        if value is not None and group.startswith("value_"):
            return match[group.replace("value", "name")]
    return None


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
