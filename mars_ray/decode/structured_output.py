"""Grammars for JSON schemas and tool calls, by https://github.com/guidance-ai/llguidance; and what
of a JSON schema a grammar can follow.

Schemas come from pydantic, zod, Java's and .NET's libraries and from hand, by drafts of many years.
llguidance does not follow all of that, and does not say where it stops, so the place at fault is
found by leaving keywords out: the first of them without which the rest can be followed.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mars_ray.errors import ModelError, RequestError


class Grammars:
    """Compiles grammars for one tokenizer. Compiling takes up to a second, so it must not run on
    the engine's thread."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_ids: Iterable[int]
    ) -> None:
        """`vocabulary` is the model's, possibly larger than the tokenizer's. Raises ModelError."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(f"{type(tokenizer).__name__} has no tokenizer.json; convert it first")
        self._tokenizer = from_tokenizer(tokenizer, vocabulary, sorted(stop_ids))
        added = tokenizer.added_tokens_decoder.items()
        # Tokens that no literal and no pattern of a grammar matches: a grammar must name their ids.
        # Of the tokens that are text for the tokenizer, these are all that look like tags.
        self.token_ids = {
            token.content: index
            for index, token in added
            if self._tokenizer.is_special_token(index)
        }
        self.tag_ids = tuple(
            index
            for index, token in sorted(added)
            if not token.special and self._tokenizer.is_special_token(index)
        )

    def compiled(self, lark: str, field: str) -> "CompiledGrammar":
        """A grammar in llguidance's variant of Lark's notation, which may contain JSON schemas.

        Raises RequestError that names `field` if it is wrong or too complex.
        """
        return CompiledGrammar(self._tokenizer, LLMatcher.grammar_from_lark(lark), field)


class CompiledGrammar:
    """See `request.Grammar`."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, field: str) -> None:
        """Raises RequestError if the grammar is wrong or too complex."""
        self.source = grammar
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._tokenizer = tokenizer
        self._field = field
        _check(self._matcher, field)

    def start(self) -> "MatcherState":
        return MatcherState(self._matcher.deep_copy(), self._tokenizer, self._field)


class MatcherState:
    """See `request.GrammarState`. Its methods raise RequestError once the grammar has become too
    complex to follow."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, field: str) -> None:
        self._matcher = matcher
        self._field = field
        self._vocabulary = tokenizer.vocab_size
        self._ends = [[token] for token in tokenizer.eos_tokens]
        self._tokens: list[int] = []

    def allowed(self, back: int, tokens: Sequence[int]) -> NDArray[np.bool_]:
        allowed_RV = np.ones((back + 1 + len(tokens), self._vocabulary), np.bool_)
        self._matcher.rollback(back)
        path = [*self._tokens[len(self._tokens) - back :], *tokens]
        consumed = 0
        for row, allowed_V in enumerate(allowed_RV):
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            _check(self._matcher, self._field)
            allowed_V[:] = np.unpackbits(bits, count=self._vocabulary, bitorder="little")
            if row == len(path) or not self._matcher.try_consume_tokens([path[row]]):
                break
            consumed += 1
        self._matcher.rollback(consumed - back)
        return allowed_RV

    def admissible(self, tokens: Sequence[int]) -> int:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            # Only the end can follow; the library would not allow even that.
            return int(tokens[:1] in self._ends)
        count = self._matcher.validate_tokens(list(tokens))
        _check(self._matcher, self._field)
        return count

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()

    def consume(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))
        _check(self._matcher, self._field)
        self._tokens += tokens


def _check(matcher: LLMatcher, field: str) -> None:
    if matcher.is_error():
        # The lines after the first are details of the library's parser.
        first = matcher.get_error().strip().partition("\n")[0]
        raise RequestError(f"a schema cannot be followed: {first}", field=field)


# White space between two parts of JSON: a space, or a new line with some indentation.
_GAP = r"( |\n[ \t]{0,20})?"
# Keywords whose values hold schemas: by name, and by themselves or in a list.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_PARTS = (
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "oneOf",
)
# Values by which a keyword allows everything. zod and .NET write them.
_IDLE: dict[str | int, tuple[Any, ...]] = {
    "propertyNames": ({}, True, {"type": "string"}),
    "uniqueItems": (False,),
    "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "minContains": (0,),
}
# They name a schema, and constrain nothing.
_NAMES = ("$schema", "$id")
# What references look up, besides places in a schema.
_REFERRED = (*_NAMES, "$anchor", "$dynamicAnchor", "components")
_MARK = "x-looked-up"  # any keyword of no meaning
_URI = "!#$%&'()*+,/:;=?@~"  # what may stand in a reference besides letters
# Each fault takes a dozen compilations, of about 4 us a character: half a second for all.
_MOST_FAULTS = 32
_MOST_CHARS = 100_000
_TOO_LARGE = "schema too large"

Place = tuple[str | int, ...]
# What becomes of a keyword, by its place and its value: another one, or nothing.
_Visit = Callable[[Place, Any], tuple[Any, Any] | None]


@dataclass(frozen=True, slots=True)
class SchemaFault:
    """Where a schema cannot be followed, and why."""

    place: Place
    reason: str


@lru_cache(maxsize=256)
def followed(schema: str, *, is_strict: bool) -> str | SchemaFault:
    """A JSON schema, and so the answer, with llguidance's options: all of it or a fault if it is
    strict, else what can be followed."""
    kept = _visited(json.loads(schema), _plain)
    kept = _visited(kept, _looked_up) if is_strict else kept
    options: dict[str, Any] = kept.pop("x-guidance", None) or {"whitespace_pattern": _GAP}
    # Lenient, it passes over formats and keywords that it does not know.
    options["lenient"] = not is_strict
    for _ in range(min(_MOST_FAULTS, 1 + _MOST_CHARS // len(schema))):
        refusal = _refusal(kept, options)
        if not refusal:
            return _json(kept, options)
        fault = SchemaFault((), refusal)
        if refusal != _TOO_LARGE:  # which is the fault of no keyword alone
            fault = _first_fault(kept, options)
        if is_strict and (not fault.place or fault.place[-1] not in _NAMES):
            return fault
        kept = _without(kept, _like(kept, fault.place)) if fault.place else {}
    return _json({}, options)


def _json(schema: dict[str, Any], options: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": options})


def _visited(schema: Any, visit: _Visit, place: Place = ()) -> Any:
    """The schema after a visit to each keyword, and to each part that should be a schema."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        here = (*place, keyword)
        if result := visit(here, value):
            name, value = result
            made[name] = _visited_parts(keyword, value, visit, here)
    return made


def _visited_parts(keyword: str, value: Any, visit: _Visit, here: Place) -> Any:
    def kept(items: Any) -> list[tuple[Any, Any]]:
        found = [
            (name, part) if isinstance(part, dict | bool) else visit((*here, name), part)
            for name, part in items
        ]
        return [(pair[0], _visited(pair[1], visit, (*here, pair[0]))) for pair in found if pair]

    if keyword in _NAMED and isinstance(value, dict):
        return dict(kept(value.items()))
    if keyword in _PARTS and isinstance(value, list):
        return [part for _, part in kept(enumerate(value))]
    return _visited(value, visit, here) if keyword in _PARTS else value


def _plain(place: Place, value: Any) -> tuple[Any, Any] | None:
    """Drops what says nothing, and null, which stands for what is not given."""
    keyword = place[-1]
    if value is None and keyword != "const":
        return None
    if value in _IDLE.get(keyword, ()):
        return None
    if keyword == "$ref" and isinstance(value, str):
        return keyword, quote(value, safe=_URI)  # generic types' names have brackets
    return keyword, value


def _looked_up(place: Place, value: Any) -> tuple[Any, Any]:
    """Whether parts of an exclusive choice do exclude each other is not seen of references that
    stand alone, but of those beside another keyword."""
    if place[-1] == "oneOf" and isinstance(value, list):
        return "oneOf", [{**part, _MARK: 1} if isinstance(part, dict) else part for part in value]
    return place[-1], value


def _without(schema: Any, places: set[Place]) -> Any:
    """The schema without these keywords; what is left of an exclusive choice is the choice."""

    def visit(place: Place, value: Any) -> tuple[Any, Any] | None:
        if place not in places:
            return place[-1], value
        return ("anyOf", value) if place[-1] == "oneOf" else None

    return _visited(schema, visit)


def _keywords(schema: dict[str, Any]) -> dict[Place, Any]:
    """The values of a schema's keywords by their places."""
    found: dict[Place, Any] = {}

    def note(place: Place, value: Any) -> tuple[Any, Any]:
        found[place] = value
        return place[-1], value

    _visited(schema, note)
    return found


def _like(schema: dict[str, Any], place: Place) -> set[Place]:
    """The place, and those of the same keyword with the same text."""
    found = _keywords(schema)
    if not isinstance(found[place], str):
        return {place}
    same = place[-1], found[place]
    return {other for other, value in found.items() if (other[-1], value) == same}


def _first_fault(schema: dict[str, Any], options: dict[str, Any]) -> SchemaFault:
    places = [place for place, _ in sorted(_keywords(schema).items(), key=_rank)]

    def refusal(count: int) -> str:
        return _refusal(_without(schema, set(places[count:])), options)

    count = bisect_left(range(len(places)), True, key=lambda number: bool(refusal(number)))
    *outer, last = places[count - 1]
    return SchemaFault(tuple(outer[:-1] if last == _MARK else [*outer, last]), refusal(count))


def _rank(found: tuple[Place, Any]) -> int:
    """Keywords come behind those that they rely on: references behind what they refer to, the
    constraints of what is referred to behind the references by which they are reached."""
    place, value = found
    keyword = place[-1]
    if keyword == "oneOf":  # its parts must exclude each other
        return 3
    if keyword in ("$ref", "$dynamicRef"):
        return 1
    holds_schemas = keyword in (*_NAMED, *_PARTS) and isinstance(value, dict | list)
    return 0 if holds_schemas or keyword in _REFERRED else 2


def _refusal(schema: dict[str, Any], options: dict[str, Any]) -> str:
    """Why a schema cannot be followed; nothing if it can."""
    grammar = LLMatcher.grammar_from_lark(f"start: %json {_json(schema, options)}")
    is_refused, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if not is_refused:
        return ""
    said = messages[0].partition("failed to compile JSON schema: ")[2] or messages[0]
    # The lines behind the first are the schema, and what the parser of regular expressions says.
    detail = re.search(r"^error: (.*)$", said, re.MULTILINE)
    first = said.splitlines()[0].partition(". Enable 'coerce_one_of'")[0]
    return f"{first} {detail[1]}" if detail else first
