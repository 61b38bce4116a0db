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
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex

from mars_ray.config.serve import ReasoningParser, ToolParser
from mars_ray.serve.protocol import ToolCallDelta

THINK, THINK_END = "<think>", "</think>"
# thoughts: the answer begins with them. marked: only if it begins with the mark.
Start = Literal["thoughts", "marked", "answer"]

# A partial match is looked for in so many of the last characters: the time grows with their square.
_TAIL_CHARS = 4096
# A run of white space is scanned once, not from each position.
_END = regex.compile(rf"(?<!\s)\s*+{THINK_END}")


def _search(pattern: regex.Pattern[str], text: str, start: int = 0) -> regex.Match[str]:
    """The first match from there on, or else the partial one at the end, which may be empty."""
    match = pattern.search(text, start)
    if match is None:
        match = pattern.search(text, max(start, len(text) - _TAIL_CHARS), partial=True)
    assert match, "nothing at all is the beginning of a match"
    return match


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
            match = _search(_END, self._held)
            thoughts, self._held = self._held[: match.start()], self._held[match.start() :]
            if not match.partial:
                self._held = self._held.removeprefix(match[0])
                self._part = "gap"
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


def _pattern(text: str) -> regex.Pattern[str]:
    """The pattern in which a space stands for any white space, of which a run is scanned once and
    not from each position, and NAME for the name of a tool."""
    named = text.replace("NAME", "(?P<name>[a-zA-Z0-9_-]++)")
    return regex.compile(named.replace(" ", r"\s*+"))


def _opening(text: str) -> regex.Pattern[str]:
    """The pattern of a call's beginning, with white space before it, up to its first argument."""
    return _pattern(rf'(?<!\s) {text} ["\[{{\w-]')


_OBJECT = r'\{ "name" : "NAME" , "arguments" :'


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text of an answer's calls: `begin before NAME between ARGUMENTS after`, each call, or
    with one `begin` for a list of them all; and how calls are found, also with other white space.
    """

    parser: ToolParser
    begin: str  # a token of its own in most vocabularies; without one a call is known by its name
    before: str
    between: str
    after: str
    joint: str
    opening: regex.Pattern[str]
    closing: regex.Pattern[str]
    following: regex.Pattern[str] | None = None  # of a list: the opening of a further object
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
    opening=_opening(f"<tool_call> {_OBJECT}"),
    closing=_pattern(r" \} </tool_call>"),
)
LLAMA3 = ToolFormat(
    parser="llama3",
    begin="",
    before='{"name": "',
    between='", "parameters": ',
    after="}",
    joint="; ",
    opening=_opening(
        r';?+ \{ (?:"type" : "function" , )?"name" : "NAME" , "(?:parameters|arguments)" :'
    ),
    closing=_pattern(r" \}"),
)
MISTRAL = ToolFormat(
    parser="mistral",
    begin="[TOOL_CALLS]",
    before='{"name": "',
    between='", "arguments": ',
    after="}",
    joint=", ",
    opening=_opening(rf"\[TOOL_CALLS\] \[ {_OBJECT}"),
    # An object of a list may end with an id, and a comma or the list's end stands behind it.
    closing=_pattern(r' (?:, "id" : "[a-zA-Z0-9_-]++" )?\} [\],]'),
    following=_opening(_OBJECT),
    is_list=True,
)
MISTRAL_ARGS = ToolFormat(
    parser="mistral",
    begin="[TOOL_CALLS]",
    before="",
    between="[ARGS]",
    after="",
    joint="",
    opening=_opening(r"\[TOOL_CALLS\] NAME (?:\[CALL_ID\] [a-zA-Z0-9]++ )?\[ARGS\]"),
    closing=_pattern(""),
)
# What calls consist of besides text, where the vocabulary has a token for it.
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


# Mistral's chat templates refuse ids of another form.
_SHORT_ID = regex.compile("[a-zA-Z0-9]{9}")
_DIGITS = string.digits + string.ascii_letters


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
        self._names = names
        self._held = ""
        self._value: _Value | None = None  # value of the call that is being read
        self._is_in_list = False  # behind a comma
        self.count = 0
        self.behind = 0  # characters of the last addition's text that stand behind its calls

    @property
    def is_cut(self) -> bool:
        """Whether the text, if it ended here, would end within a call's arguments."""
        return self._value is not None and not self._value.is_over

    def push(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """The text that is safe to pass on, and the additions to calls."""
        self._held += text
        said, calls, self.behind = "", [], 0
        while True:
            if self._value is None:
                new, begun = self._outside()
                said += new
                if begun is None:
                    self.behind = len(new) if calls else 0
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
        match = self._opening()
        said = self._held[: match.start()]
        if match.partial:
            self._held = match[0]
            return said, None
        self._is_in_list = False
        self._held = self._held[match.end() - 1 :]  # from the value's first character on
        self._value = _Value()
        begun = ToolCallDelta(self.count, id=self._call_id(), name=match["name"])
        self.count += 1
        return said, begun

    def _opening(self) -> regex.Match[str]:
        """The next opening, or where the text may end within one."""
        if self._is_in_list and self._form.following:
            match = self._form.following.match(self._held, partial=True)
            if match and (match.partial or match["name"] in self._names):
                return match
            self._is_in_list = False  # what else stands in the list is text
        start = 0
        while True:
            match = _search(self._form.opening, self._held, start)
            if match.partial or match["name"] in self._names:
                return match
            start = match.end()

    def _call_id(self) -> str:
        name = f"call_{self._id}_{self.count + 1}"
        return short_id(name) if self._form.parser == "mistral" else name

    def _ended(self) -> bool:
        """Whether the call is over; anything but its closing is text again."""
        if self.is_cut:
            return False
        match = self._form.closing.match(self._held, partial=True)
        if match and match.partial:
            return False
        if match:
            self._is_in_list = match[0].endswith(",")
            self._held = self._held[match.end() :]
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
