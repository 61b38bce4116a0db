r"""How models write calls of tools: the forms that `tool_parser` of a job names.

    hermes    <tool_call>\n{"name": "add", "arguments": {...}}\n</tool_call>     each call
    llama3    {"name": "add", "parameters": {...}}; {"name": ...}
    mistral   [TOOL_CALLS][{"name": "add", "arguments": {...}}, {"name": ...}]   v3 and v7
              [TOOL_CALLS]add[ARGS]{...}[TOOL_CALLS]...                          v11 and later

`tool_parser.py` reads them, `formats.py` has their grammar.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mars_ray.config.serve import ToolParser


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
        """What a model is told whose chat template says nothing of tools."""
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
