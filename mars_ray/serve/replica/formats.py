"""The required form of an answer as a grammar in llguidance's notation.

An answer is free text with tool calls in it, or calls alone, or JSON; thoughts may stand before it.
How calls are written is a `ToolFormat`. Arguments are JSON that follows the tool's schema.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mars_ray.decode.json_schema import SchemaFault, followed
from mars_ray.errors import RequestError
from mars_ray.serve.protocol import GenerationRequest, Tools
from mars_ray.serve.replica.reasoning_parser import THINK, THINK_END, Start
from mars_ray.serve.replica.tool_parser import MARKERS, ToolFormat

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_MARKERS = re.compile(f"({'|'.join(map(re.escape, (*MARKERS, THINK, THINK_END)))})")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a grammar must name by their ids, since no literal matches them."""

    token_ids: Mapping[str, int]
    tag_ids: Sequence[int]  # those among them that may stand in a text

    def terms(self, text: str) -> str:
        """A text as a sequence of terminals."""
        parts = [part for part in _MARKERS.split(text) if part]
        return " ".join(self._term(part) for part in parts)

    def _term(self, part: str) -> str:
        token = self.token_ids.get(part)
        return json.dumps(part, ensure_ascii=False) if token is None else f"<[{token}]>"

    def text(self, name: str, *without: str) -> str:
        """A rule for any text, except for these tokens."""
        excluded = {self.token_ids.get(marker) for marker in without}
        ids = ",".join(str(token) for token in self.tag_ids if token not in excluded)
        return f"{name}: TEXT (<[{ids}]> TEXT)*" if ids else f"{name}: TEXT"

    def until(self, name: str, text: str, marker: str) -> str:
        """A rule for a text, which is another rule, up to the marker and with it."""
        if marker in self.token_ids:
            return f"{name}: {text} {self.terms(marker)}"
        return f"{name}[lazy]: TEXT {json.dumps(marker)}"


def grammar_of(
    call: GenerationRequest, form: ToolFormat, vocabulary: Vocabulary, start: Start | None = None
) -> str | None:
    """The grammar of the answers to a call, or None if any text will do.

    start: how thoughts begin, if the answers have any that are told apart. Raises RequestError that
    names the place in a strict schema that cannot be followed.
    """
    if call.tools is None and call.schema is None:
        return None
    rules = ["%llguidance {}", r"TEXT: /(.|\n)*/"]
    answer: list[str] = []
    must_call = call.tools is not None and call.tools.is_required
    if call.schema is not None and not must_call:
        answer.append("json")
        place = "response_format.json_schema.schema"
        rules.append(f"json: {_json(call.schema, place, is_strict=call.is_strict)}")
    if call.tools is not None:
        is_free = not must_call and call.schema is None
        tags = MARKERS if start is None else (*MARKERS, THINK, THINK_END)
        rules += _free(call.tools, form, vocabulary, tags) if is_free else []
        rules += _bodies(call.tools, form, vocabulary)
        answer.append("free" if is_free else "calls")
        if not is_free:
            rules.append(f"calls: {_calls(call.tools, form, vocabulary)}")
    rules.append(f"answer: {' | '.join(answer)}")
    if start in (None, "answer"):
        return "\n".join([*rules, "start: answer"])
    return "\n".join([*rules, *_thoughts(start == "marked", vocabulary)])


def _thoughts(is_marked: bool, vocabulary: Vocabulary) -> list[str]:
    """Rules for the thoughts, and the answer behind them."""
    mark = vocabulary.terms(THINK)
    return [
        f"start: ({mark} thoughts GAP?)? answer"
        if is_marked
        else f"start: ({mark})? thoughts GAP? answer",
        vocabulary.text("thought", THINK, THINK_END, *MARKERS),
        vocabulary.until("thoughts", "thought", THINK_END),
        r"GAP: /[ \n]{1,4}/",
    ]


def _calls(tools: Tools, form: ToolFormat, vocabulary: Vocabulary) -> str:
    """Calls and nothing else."""
    begin, joint = vocabulary.terms(form.begin), vocabulary.terms(form.joint)
    if form.is_list:
        return f"{begin} list"
    return f"{begin} body ({joint} {begin} body)*" if tools.is_parallel else f"{begin} body"


def _bodies(tools: Tools, form: ToolFormat, vocabulary: Vocabulary) -> list[str]:
    """Rules for the calls of each tool, behind their beginning, and for a list of them."""
    chosen = _chosen(tools)
    after = vocabulary.terms(form.after)
    rules = [f"body: {' | '.join(f'body_{place}' for place in chosen)}"]
    for place, function in chosen.items():
        before = vocabulary.terms(f"{form.before}{function['name']}{form.between}")
        # Some schemas leave the type of arguments open, which is always this.
        schema = {"type": "object", **(function.get("parameters") or _NO_PARAMETERS)}
        where, is_strict = f"tools.{place}.function.parameters", function.get("strict", False)
        rules.append(f"body_{place}: {before} arguments_{place} {after}")
        rules.append(f"arguments_{place}: {_json(schema, where, is_strict=is_strict)}")
    if form.is_list:
        more = f"({vocabulary.terms(form.joint)} body)*" if tools.is_parallel else ""
        rules.append(f'list: " "? "[" body {more} "]"')
    return rules


def _json(schema: Mapping[str, Any], place: str, *, is_strict: bool) -> str:
    """JSON by the schema, which the request has at this place."""
    text = followed(json.dumps(schema), is_strict=is_strict)
    if isinstance(text, SchemaFault):
        field = ".".join(map(str, (place, *text.place)))
        message = f"'{field}' cannot be followed: {text.reason}; leave it out, or 'strict'"
        raise RequestError(message, field=field)
    return f"%json {text}"


def _free(tools: Tools, form: ToolFormat, vocabulary: Vocabulary, tags: Sequence[str]) -> list[str]:
    """Rules for a text, without these tags, that may hold calls. It ends at the start of a call."""
    rules = [
        vocabulary.text("text", *tags),
        "free: called* text" if tools.is_parallel else "free: text | called",
    ]
    if form.begin:
        tail = "list" if form.is_list else "body"
        until = vocabulary.until("until", "text", form.begin)
        return [*rules, f"called: until {tail}", until]
    # Such an object is a call only if it names a tool and has its parameters, since a text may hold
    # other JSON.
    names = {place: function["name"] for place, function in _chosen(tools).items()}
    rules.append(f"called: {' | '.join(f'called_{place}' for place in names)}")
    for place, name in names.items():
        rules.append(f'called_{place}: until_{place} " "? arguments_{place} "}}"')
        keys = rf'\{{\s*"name"\s*:\s*"{name}"\s*,\s*"(parameters|arguments)"\s*:'
        rules.append(rf"until_{place}[lazy]: /(.|\n)*{keys}/")
    return rules


def _chosen(tools: Tools) -> dict[int, dict[str, Any]]:
    """The functions that may be called, by their places among the tools."""
    functions = enumerate(definition["function"] for definition in tools.definitions)
    return {place: each for place, each in functions if tools.named in (None, each["name"])}
