"""How one model's conversations are written: its chat template, its tools, its thoughts; and the
required form of an answer as a grammar in llguidance's notation.

A template that describes tools, and writes calls in a format that can be read, needs nothing else.
For the others the tools are described in a system message; calls and their results become text.

An answer is free text with tool calls in it, or calls alone, or JSON; thoughts may stand before it.
How calls are written is a `ToolFormat`. Arguments are JSON that follows the tool's schema.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from mars_ray.config.serve import ReasoningParser, ToolParser
from mars_ray.data.chat import ChatEncoder, encoder_of
from mars_ray.data.sources import Call as ChatCall
from mars_ray.data.sources import Message as ChatTurn
from mars_ray.decode.structured_output import Grammars, SchemaFault, followed
from mars_ray.errors import DataError, ModelError, RequestError
from mars_ray.serve.protocol import GenerationRequest, Prompt, Switches, Tools, Turn
from mars_ray.serve.replica.parsers import (
    HERMES,
    LLAMA3,
    MARKERS,
    MISTRAL,
    MISTRAL_ARGS,
    THINK,
    THINK_END,
    ReasoningReader,
    Start,
    ToolCallReader,
    ToolFormat,
    short_id,
    start_of,
)

EFFORT = "reasoning_effort"
_THINKING = ("enable_thinking", "thinking")
_NO_EFFORT = "none"


def template_options(switches: Switches, encoder: ChatEncoder) -> dict[str, bool | str]:
    """The variables that the template gets: whether, and how hard, the model is to think.

    A template with variables of its own is a program with inputs, so only these are let in. Whether
    it knows a switch is seen by what it writes with one value and with another.

    Raises RequestError for a switch that the template does not know, unless it says not to think,
    which is what a model without such a switch does.
    """
    options: dict[str, bool | str] = {}
    for name, value in switches:
        if name == EFFORT:
            if value == _NO_EFFORT:
                off = {each: False for each in _THINKING if encoder.has_switch(each, False, True)}
                options = off | options
            if encoder.has_switch(EFFORT, "low", "high"):
                options[EFFORT] = value
            elif value != _NO_EFFORT:
                raise RequestError(
                    f"the chat template of this model knows no efforts: leave {EFFORT!r} out, or "
                    "set a thinking switch in 'chat_template_kwargs'",
                    field=EFFORT,
                )
        elif encoder.has_switch(name, False, True):
            options[name] = value
        elif value:
            raise RequestError(
                f"the chat template of this model has no switch {name!r}: leave it out",
                field=f"chat_template_kwargs.{name}",
            )
    return options


# Each is looked for in what the template writes of a call. The last has no mark of its own.
_FORMATS = (HERMES, MISTRAL, MISTRAL_ARGS, LLAMA3)
_SAMPLE = ChatCall("look_at", {"it": "this"}, "a1b2c3d4e")
_RESULT = "<tool_response>\n{}\n</tool_response>"


class ChatFormat:
    """The tokens of conversations, and the readers and grammars of answers."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        grammars: Grammars,
        tool_parser: ToolParser | None = None,
        reasoning_parser: ReasoningParser | None = None,
    ) -> None:
        """Raises ModelError if a parser does not fit the model."""
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(grammars.token_ids, grammars.tag_ids)
        self._tool_parser = tool_parser
        self._reasoning_parser: ReasoningParser | None = reasoning_parser
        self._think_ids = -1, -1  # of the marks, if there is a parser for them
        self._starts = lru_cache(maxsize=64)(self._start)
        self._tells = lru_cache(maxsize=2)(_tells)
        special = {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        shown = {grammars.token_ids.get(marker) for marker in (*MARKERS, THINK, THINK_END)}
        # Special tokens are no text, but those that mark calls and thoughts must be seen.
        self._hidden = frozenset(special - shown)
        self._has_special_marks = bool(special & shown)
        if tool_parser:
            self._check_tool_parser(tool_parser)
        if reasoning_parser:
            vocabulary = tokenizer.get_vocab()
            if lacking := [mark for mark in (THINK, THINK_END) if mark not in vocabulary]:
                raise ModelError(
                    f"reasoning_parser = {reasoning_parser!r} needs the tokens {THINK} and "
                    f"{THINK_END}, and this model's tokenizer does not have "
                    f"{' and '.join(lacking)}: leave it out"
                )
            self._think_ids = vocabulary[THINK], vocabulary[THINK_END]

    def encode(
        self,
        prompt: Prompt,
        tools: Tools | None = None,
        switches: Switches = (),
        *,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """A prompt's tokens. Raises DataError and RequestError."""
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            begin = self._tokenizer.bos_token_id
            if add_special_tokens and tokens[:2] == [begin, begin]:
                # A conversation that a template has rendered begins with the token that the
                # tokenizer adds, and gets no second one.
                own = self._tokenizer.encode(prompt, add_special_tokens=False)
                tokens = tokens[1:] if len(tokens) > len(own) else tokens
            return tuple(tokens)
        turns = [part for part in prompt if isinstance(part, Turn)]
        if not turns:
            return tuple(part for part in prompt if isinstance(part, int))
        encoder = self._encoder_of(has_tools=tools is not None)
        options = template_options(switches, encoder) if switches else {}
        definitions = tools.definitions if tools else ()
        said = [self._turn(turn) for turn in turns]
        if not self._tells(encoder):
            said, definitions = self._as_text(said, definitions), ()
        plan = encoder.plan_prompt(said, definitions, options, is_answered=add_generation_prompt)
        return tuple(encoder.encode([plan])[0].input_ids.tolist())

    def grammar(self, request: GenerationRequest) -> str | None:
        """The grammar of the answers, if any text will not do. Raises RequestError for tools whose
        calls could not be read."""
        start = self._start_of(request)
        tools = request.tools
        if tools:
            if not (tools.is_required or self._tool_parser or self._found):
                raise RequestError(self._no_parser(), field="tools")
            tools = replace(tools, is_parallel=tools.is_parallel and self._takes_several)
            request = replace(request, tools=tools)
        return grammar_of(request, self._format, self._vocabulary, start)

    def tool_reader(self, request: GenerationRequest, answer_id: str) -> ToolCallReader | None:
        """The reader of one answer's calls, if it may make any."""
        if request.tools is None:
            return None
        names = {definition["function"]["name"] for definition in request.tools.definitions}
        return ToolCallReader(answer_id, self._format, names)

    def reasoning_reader(self, request: GenerationRequest) -> ReasoningReader | None:
        """The reader of one answer's thoughts, if they are told apart."""
        start = self._start_of(request)
        if start is None:
            return None
        return ReasoningReader(start, *self._think_ids)

    def decode(self, request: GenerationRequest, tokens: Sequence[int]) -> str:
        """The text of tokens, with the marks of calls and thoughts if they are looked for."""
        is_read = request.tools is not None or self._start_of(request) is not None
        shows = is_read and self._has_special_marks
        text = self._tokenizer.decode(
            [token for token in tokens if token not in self._hidden] if shows else list(tokens),
            skip_special_tokens=not shows,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text

    def _encoder_of(self, *, has_tools: bool) -> ChatEncoder:
        """The encoder of conversations with or without tools; a template for tools that writes no
        calls is of no use."""
        encoder = encoder_of(self._tokenizer, has_tools=has_tools)
        return encoder if self._tells(encoder) else encoder_of(self._tokenizer)

    @cached_property
    def _encoder(self) -> ChatEncoder:
        """That of conversations with tools."""
        return self._encoder_of(has_tools=True)

    @cached_property
    def _has_tool_template(self) -> bool:
        return self._tells(self._encoder)

    @cached_property
    def _found(self) -> ToolFormat | None:
        """The format in which the template writes calls."""
        if not self._has_tool_template:
            return None
        return next((form for form in _FORMATS if self._reads(form)), None)

    def _reads(self, form: ToolFormat) -> bool:
        """Whether the template writes calls in this format."""
        reader = ToolCallReader("", form, {_SAMPLE.name})
        said, deltas = reader.push(self._encoder.written_calls([_SAMPLE]))
        if not form.begin and self._encoder.without_special(said).strip():
            return False  # an object between marks of another format
        try:
            arguments = json.loads("".join(delta.arguments for delta in deltas))
        except ValueError:
            return False
        return reader.count == 1 and not reader.is_cut and arguments == _SAMPLE.arguments

    @cached_property
    def _format(self) -> ToolFormat:
        """The format of calls; Hermes' for models that were not trained to write any."""
        if self._found:
            return self._found
        if self._tool_parser == "mistral":
            has_args = "[ARGS]" in self._tokenizer.get_vocab()
            return MISTRAL_ARGS if has_args else MISTRAL
        return LLAMA3 if self._tool_parser == "llama3" else HERMES

    @cached_property
    def _takes_several(self) -> bool:
        """Whether the template takes several calls in one answer; Llama 3's does not."""
        several = [_SAMPLE, replace(_SAMPLE, id="b1b2c3d4e")]
        return not self._has_tool_template or bool(self._encoder.written_calls(several))

    @cached_property
    def _takes_system(self) -> bool:
        return self._encoder.takes(ChatTurn("system", "Be brief."), ChatTurn("user", "Why?"))

    def _check_tool_parser(self, parser: ToolParser) -> None:
        if parser == "mistral" and MISTRAL.begin not in self._tokenizer.get_vocab():
            raise ModelError(
                f"tool_parser = {parser!r} needs the token {MISTRAL.begin}, which this model's "
                "tokenizer does not have: name another one, or leave it out"
            )
        if not self._has_tool_template or (self._found and self._found.parser == parser):
            return
        fitting = f"is {self._found.parser!r}" if self._found else "is none of those known here"
        raise ModelError(
            f"tool_parser = {parser!r} does not fit this model: the format in which its chat "
            f"template writes calls {fitting}. Leave it out"
        )

    def _no_parser(self) -> str:
        instead = "; or have a call made with tool_choice 'required' or the name of a tool"
        if self._has_tool_template:
            return (
                "the chat template of this model writes calls in a format that this server does "
                f"not read, so with tool_choice 'auto' they would be missed{instead}"
            )
        return (
            "the chat template of this model writes no calls of tools: set tool_parser in the "
            "service's job (hermes, llama3 or mistral), with which they are described in a system "
            "message"
            f"{instead}"
        )

    def _start_of(self, request: GenerationRequest) -> Start | None:
        prompt = request.prompts[0]
        is_chat = isinstance(prompt, tuple) and isinstance(prompt[0], Turn)
        if not (is_chat and self._reasoning_parser):
            return None
        return self._starts(request.switches, request.tools is not None)

    def _start(self, switches: Switches, has_tools: bool) -> Start:
        assert self._reasoning_parser
        encoder = self._encoder_of(has_tools=has_tools)
        options = template_options(switches, encoder) if switches else {}
        return start_of(encoder.answer_prefix(options), self._reasoning_parser)

    def _turn(self, turn: Turn) -> ChatTurn:
        """The turn for the chat template. Raises DataError if arguments of an earlier call are not
        JSON, or exceed its limits."""
        calls = []
        for call in turn.calls:
            try:
                # Limits depth and numbers as for a body, because templates visit every level.
                arguments = from_json(call.arguments)
            except ValueError as error:
                message = f"the arguments of call {call.id!r} are not JSON: {error}"
                raise DataError(message) from error
            calls.append(ChatCall(call.name, arguments, self._call_id(call.id)))
        call_id = turn.call_id and self._call_id(turn.call_id)
        return ChatTurn(
            turn.role, turn.content, tuple(calls), call_id, turn.reasoning, name=turn.name
        )

    def _call_id(self, call_id: str) -> str:
        return short_id(call_id) if self._format.parser == "mistral" else call_id

    def _as_text(
        self, turns: Iterable[ChatTurn], definitions: Sequence[dict[str, object]]
    ) -> list[ChatTurn]:
        """The conversation for a template without tools: they are described, and calls and their
        results are text. Results of several calls become one message."""
        said: list[ChatTurn] = []
        results: list[str] = []
        for turn in turns:
            if turn.role == "tool":
                results.append(_RESULT.format(turn.content))
                continue
            if results:
                said.append(ChatTurn("user", "\n".join(results)))
                results = []
            calls = [(c.name, json.dumps(c.arguments, ensure_ascii=False)) for c in turn.calls]
            parts = [turn.content, self._format.write(calls) if calls else ""]
            content = "\n".join(part for part in parts if part)
            said.append(replace(turn, content=content, calls=()))
        if results:
            said.append(ChatTurn("user", "\n".join(results)))
        if not definitions:
            return said
        # The tools stand in the system message, or in the first one for templates that take none.
        text, first = self._format.description(definitions), said[0]
        if first.role == "system":
            return [replace(first, content=f"{first.content}\n\n{text}"), *said[1:]]
        if self._takes_system:
            return [ChatTurn("system", text), *said]
        return [replace(first, content=f"{text}\n\n{first.content}"), *said[1:]]


def _tells(encoder: ChatEncoder) -> bool:
    """Whether the template describes tools and writes calls, in whatever format."""
    return encoder.describes_tools and _SAMPLE.name in encoder.written_calls([_SAMPLE])


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_MARKERS = re.compile(f"({'|'.join(map(re.escape, (*MARKERS, THINK, THINK_END)))})")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a grammar must name by their ids, since no literal matches them."""

    token_ids: Mapping[str, int]
    tag_ids: Sequence[int]  # those among them that may stand in a text

    def terms(self, text: str) -> str:
        """A text as a sequence of terminals."""
        terms = []
        for part in filter(None, _MARKERS.split(text)):
            token = self.token_ids.get(part)
            written = json.dumps(part, ensure_ascii=False)
            terms.append(written if token is None else f"<[{token}]>")
        return " ".join(terms)

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
            begin, joint = vocabulary.terms(form.begin), vocabulary.terms(form.joint)
            more = f" ({joint} {begin} body)*" if call.tools.is_parallel else ""
            rules.append(f"calls: {begin} list" if form.is_list else f"calls: {begin} body{more}")
    rules.append(f"answer: {' | '.join(answer)}")
    if start in (None, "answer"):
        return "\n".join([*rules, "start: answer"])
    mark = vocabulary.terms(THINK)
    marked = f"({mark} thoughts GAP?)?" if start == "marked" else f"({mark})? thoughts GAP?"
    rules += [
        f"start: {marked} answer",
        vocabulary.text("thought", THINK, THINK_END, *MARKERS),
        vocabulary.until("thoughts", "thought", THINK_END),
        r"GAP: /[ \n]{1,4}/",
    ]
    return "\n".join(rules)


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
