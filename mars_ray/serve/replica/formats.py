"""The required form of an answer as a grammar in llguidance's notation.

An answer is free text with tool calls in it, or calls alone, or JSON. A call is written as:

    <tool_call>
    {"name": "...", "arguments": {...}}
    </tool_call>

This is how Hermes and Qwen2.5 models write calls (their chat templates say so to the model).
"""

import json
from typing import Any

from mars_ray.serve.protocol import GenerationRequest, Tools

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_BEGIN, _END = json.dumps(CALL_BEGIN), json.dumps(CALL_END)
_LITERALS = (f"BEGIN: {_BEGIN}", f"END: {_END}", 'LINE: "\\n"')
# Keys of a schema whose values are not schemas, and keys whose values hold schemas by name.
_VALUES = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(call: GenerationRequest) -> str | None:
    """The grammar of the answers to a call, or None if any text will do."""
    if call.tools is None:
        return None if call.schema is None else _lark(["start: json", _json(call.schema)])
    calls = "call (LINE call)*" if call.tools.is_parallel else "call"
    rules = [f"call: BEGIN LINE body LINE END\n{_body(call.tools)}", *_LITERALS]
    if call.tools.is_required:
        return _lark([f"start: {calls}", *rules])
    if call.schema is not None:
        return _lark([f"start: json | {calls}", _json(call.schema), *rules])
    # Free text ends at the start of a call.
    start = "start: free* rest" if call.tools.is_parallel else "start: free | rest"
    free = [start, "free: begin LINE body LINE END", "rest: TEXT"]
    lexemes = [f"begin[lazy]: TEXT {_BEGIN}", r"TEXT: /(.|\n)*/"]
    return _lark([*free, *lexemes, _body(call.tools), *_LITERALS])


def _lark(rules: list[str]) -> str:
    return "\n".join(["%llguidance {}", *rules])


def _json(schema: dict[str, Any]) -> str:
    return f"json: %json {json.dumps(schema)}"


def _body(tools: Tools) -> str:
    functions = [definition["function"] for definition in tools.definitions]
    bodies = [
        f"%json {json.dumps(_call_schema(function))}"
        for function in functions
        if tools.named in (None, function["name"])
    ]
    return f"body: {' | '.join(bodies)}"


def _call_schema(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": _moved(function.get("parameters") or _NO_PARAMETERS),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any) -> Any:
    """A schema with its internal references adjusted to its place in the schema of a call."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved_part(key, part) for key, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = "#/properties/arguments" + reference[1:]
    return moved


def _moved_part(key: str, part: Any) -> Any:
    if key in _VALUES:
        return part
    if key in _NAMED and isinstance(part, dict):
        return {name: _moved(named) for name, named in part.items()}
    return _moved(part)
