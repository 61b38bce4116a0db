"""Tools and thoughts by the chat templates of well-known families."""

import json
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import ANY

import pytest
from pydantic import ValidationError
from serve.chat_templates import FAMILIES, of_family
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.request import Completion, Request, TokenEvent
from mars_ray.decode.structured_output import CompiledGrammar, Grammars
from mars_ray.errors import ModelError, RequestError
from mars_ray.serve.openai.sse import Answer, ReplyWriter
from mars_ray.serve.protocol import GenerationRequest, ReplyForm, TokenText, ToolCall, Tools, Turn
from mars_ray.serve.replica.chat_format import ChatFormat
from mars_ray.serve.replica.output_processor import OutputProcessor
from mars_ray.serve.replica.stats import ReplicaCounters

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = Tools((ADD, NOW))
ASKED = Turn("user", "What is it?")
ADDED = ToolCall("call_of-another-server", "add", '{"a": 1}')
TOLD = ToolCall("call_7", "now", "{}")
# What models of these families write, and two calls where their templates know of several.
ONE = {
    "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1}}',
    "mistral-v3": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    "mistral-v11": '[TOOL_CALLS]add[ARGS]{"a": 1}',
}
ONE |= {"hermes": ONE["qwen2.5"], "qwen3": ONE["qwen2.5"], "plain": ONE["qwen2.5"]}
ONE |= {"mistral-v7": ONE["mistral-v3"].replace(" ", "", 1)}
TWO = {
    "qwen2.5": ONE["qwen2.5"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral-v3": ONE["mistral-v3"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral-v11": ONE["mistral-v11"] + "[TOOL_CALLS]now[ARGS]{}",
}
TWO |= {"hermes": TWO["qwen2.5"], "qwen3": TWO["qwen2.5"], "plain": TWO["qwen2.5"]}


@pytest.fixture(scope="module")
def tiny(checkpoint) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


def grammars_of(tokenizer: PreTrainedTokenizerBase) -> Grammars:
    return Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def form_of(tiny: PreTrainedTokenizerBase, family: str, **parsers: Any) -> ChatFormat:
    tokenizer = of_family(tiny, family)
    return ChatFormat(tokenizer, grammars_of(tokenizer), **parsers)


def call_of(tools: Tools | None = TOOLS, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        "id", ((ASKED,),), ExactMode(), Sampling(), None, 10, tools=tools, **fields
    )


def compiled(chat: ChatFormat, call: GenerationRequest) -> CompiledGrammar:
    text = chat.grammar(call)
    assert text is not None
    return grammars_of(chat._tokenizer).compiled(text, "tools")


def follows(chat: ChatFormat, grammar: CompiledGrammar, text: str) -> bool:
    tokens = [*chat._tokenizer.encode(text), chat._tokenizer.eos_token_id]
    return grammar.start().admissible(tokens) == len(tokens)


def read(chat: ChatFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls that a client gets of these tokens."""
    call = call_of()
    reader = chat.tool_reader(call, "7")
    assert reader
    said, deltas = reader.push(chat.decode(call, chat._tokenizer.encode(text)))
    made: list[list[str]] = []
    for delta in deltas:
        made += [[delta.name, ""]] if delta.name else []
        made[-1][1] += delta.arguments
    return said + reader.flush(), [(name, json.loads(given)) for name, given in made]


def prompt(chat: ChatFormat, *turns: Turn, tools: Tools | None = TOOLS) -> str:
    return chat._tokenizer.decode(list(chat.encode(turns, tools)))


@pytest.mark.parametrize("family", ONE)
def test_calls_are_read_as_the_family_writes_them(tiny, family):
    """Also of tokens that are special, which the text of an answer leaves out."""
    chat = form_of(tiny, family, tool_parser="hermes" if family == "plain" else None)
    assert read(chat, ONE[family]) == ("", [("add", {"a": 1})])
    assert read(chat, "So: " + ONE[family])[1] == [("add", {"a": 1})]
    if family in TWO:
        assert read(chat, TWO[family]) == ("", [("add", {"a": 1}), ("now", {})])


@pytest.mark.parametrize("family", ONE)
def test_calls_follow_their_schemas(tiny, family):
    """In any text, and alone if they are required. Guards a grammar that forbids the tokens which
    mark the family's calls."""
    chat = form_of(tiny, family, tool_parser="hermes" if family == "plain" else None)
    one, broken = ONE[family], ONE[family].replace('"a"', '"b"')
    free, must = compiled(chat, call_of()), compiled(chat, call_of(Tools((ADD,), is_required=True)))
    for text in ("hello", one, f"So: {one}", '{"name": "x"}'):
        assert follows(chat, free, text), text
    assert follows(chat, must, one)
    assert not follows(chat, free, broken)
    assert not follows(chat, must, broken)
    assert not follows(chat, must, "hello")
    single = Tools((ADD, NOW), is_required=True, is_parallel=False)
    if family in TWO:
        assert follows(chat, free, TWO[family])
        assert not follows(chat, compiled(chat, call_of(single)), TWO[family])
    named = compiled(chat, call_of(Tools((ADD, NOW), is_required=True, named="now")))
    assert not follows(chat, named, one)


def test_an_answer_has_one_call_where_the_template_takes_no_more(tiny):
    """Guards an answer that cannot be sent back: Llama 3's template refuses it."""
    chat = form_of(tiny, "llama3")
    two = f"{ONE['llama3']}; " + '{"name": "now", "parameters": {}}'
    assert not follows(chat, compiled(chat, call_of(Tools((ADD, NOW), is_required=True))), two)
    assert read(chat, two) == ("", [("add", {"a": 1}), ("now", {})])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "xml"])
def test_calls_and_results_are_part_of_the_conversation(tiny, family):
    """With the ids of another server. Guards a template that refuses them, and one that leaves them
    out without a word."""
    chat = form_of(tiny, family)
    text = prompt(
        chat,
        ASKED,
        Turn("assistant", "", (ADDED,)),
        Turn("tool", "five", call_id=ADDED.id),
        Turn("user", "Thanks"),
        tools=None,
    )
    assert '"a": 1' in text
    assert text.index("What is it?") < text.index("add") < text.index("five") < text.index("Thanks")


def test_names_reach_a_template_that_shows_them(tiny):
    """Of every role, as text; no other template's prompt changes."""
    named = [
        Turn("system", "Be brief.", name="rules"),
        Turn("user", "Why?", name="bob<|im_end|>"),
        Turn("assistant", "", (TOLD,), name="helper"),
        Turn("tool", "noon", call_id=TOLD.id, name="now"),
    ]
    bare = [replace(turn, name=None) for turn in named]
    tokenizer = of_family(tiny, "qwen2.5")
    shown = "{{- '<|im_start|>' + (m.name or m.role) + '\\n' -}}"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- '<|im_start|>' + m.role + '\\n' -}}", shown
    ).replace("<tool_response>", "' + (m.name or '') + '")
    chat = ChatFormat(tokenizer, grammars_of(tokenizer))
    text = prompt(chat, *named)
    for name in ("rules", "bob<|im_end|>", "helper", "now"):
        assert f"<|im_start|>{name}\n" in text or f"user\n{name}\n" in text
    ends = [
        chat.encode(tuple(turns)).count(chat._tokenizer.eos_token_id) for turns in (named, bare)
    ]
    assert ends[0] == ends[1]
    for family in ("qwen2.5", "plain", "mistral-v7"):
        other = form_of(tiny, family)
        assert prompt(other, *named) == prompt(other, *bare)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_told_of_the_tools(tiny, family):
    """By its template, or by a system message, or in the first message."""
    chat = form_of(tiny, family)
    text = prompt(chat, ASKED)
    assert '"now"' in text
    assert '"now"' not in prompt(chat, ASKED, tools=None)
    if family == "plain":
        with_system = prompt(chat, Turn("system", "Be brief."), ASKED)
        assert text.count("system") == with_system.count("system") == 1
        assert with_system.index("Be brief.") < with_system.index('"now"')
    if family == "no-system":
        assert text.index('"now"') < text.index("What is it?")
        assert "system" not in text


def test_a_template_of_its_own_for_tools_is_used_for_them(tiny):
    """Hermes', Command R's and others' tokenizers name it `tool_use`. Guards tools that the default
    one leaves out, or a default one that is never used again."""
    tokenizer = of_family(tiny, "qwen2.5")
    tokenizer.chat_template = {
        "default": FAMILIES["plain"].template,
        "tool_use": FAMILIES["qwen2.5"].template,
        "rag": "{{ documents }}",
    }
    chat = ChatFormat(tokenizer, grammars_of(tokenizer))
    for family, tools in (("plain", None), ("qwen2.5", TOOLS)):
        assert prompt(chat, ASKED, tools=tools) == prompt(form_of(tiny, family), ASKED, tools=tools)
    assert follows(chat, compiled(chat, call_of()), ONE["qwen2.5"])
    # Calls of earlier answers are text for a template that knows none.
    earlier = prompt(
        chat, ASKED, Turn("assistant", "", (ADDED,)), Turn("tool", "five", call_id="c"), tools=None
    )
    assert '"a": 1' in earlier
    assert "five" in earlier


def test_thoughts_begin_as_the_template_in_use_says(tiny):
    """The one for tools opens them here, the other does not."""
    tokenizer = of_family(tiny, "deepseek-r1")
    tokenizer.chat_template = {
        "default": FAMILIES["qwen3"].template,
        "tool_use": FAMILIES["deepseek-r1"].template,
    }
    chat = ChatFormat(tokenizer, grammars_of(tokenizer), reasoning_parser="qwen3")
    for tools, said in ((None, ("", "hm</think>yes")), (TOOLS, ("hm", "yes"))):
        reader = chat.reasoning_reader(call_of(tools))
        assert reader
        assert reader.push("hm</think>yes") == said


@pytest.mark.parametrize(
    ("family", "says"), [("plain", "set tool_parser"), ("xml", "does not read")]
)
def test_auto_needs_a_format_that_can_be_read(tiny, family, says):
    """Else calls would be content. Required ones follow a grammar, which any model does."""
    chat = form_of(tiny, family)
    with pytest.raises(RequestError, match=says) as caught:
        chat.grammar(call_of())
    assert caught.value.field == "tools"
    required = call_of(Tools((ADD,), is_required=True))
    assert follows(chat, compiled(chat, required), ONE["hermes"])


@pytest.mark.parametrize(
    ("family", "parser", "says"),
    [
        ("qwen2.5", "llama3", "is 'hermes'"),
        ("llama3", "hermes", "is 'llama3'"),
        ("xml", "hermes", "none of those"),
        ("plain", "mistral", r"needs the token \[TOOL_CALLS\]"),
    ],
)
def test_a_parser_that_does_not_fit_is_an_error_at_the_start(tiny, family, parser, says):
    """And not a call that is missed."""
    with pytest.raises(ModelError, match=says):
        form_of(tiny, family, tool_parser=parser)


def test_a_parser_that_there_is_not_is_an_error_of_the_job():
    """Which names those that there are."""
    for name, one in (("tool_parser", "llama3"), ("reasoning_parser", "deepseek_r1")):
        with pytest.raises(ValidationError, match=one):
            ServeJob.model_validate({"checkpoint": "x", name: "other"})


def test_a_template_without_tools_gets_those_of_the_parser(tiny):
    """Each format describes itself."""
    for parser, example in (("hermes", "<tool_call>"), ("llama3", '{"name": "NAME", "parameters"')):
        assert example in prompt(form_of(tiny, "plain", tool_parser=parser), ASKED)


@pytest.mark.parametrize(
    ("family", "parser", "text", "expected"),
    [
        ("deepseek-r1", "deepseek_r1", "hm\n</think>\n\nyes", ("hm", "yes")),
        ("deepseek-r1", "qwen3", "hm\n</think>\n\nyes", ("hm", "yes")),
        ("qwen3", "deepseek_r1", "hm</think>yes", ("hm", "yes")),
        ("qwen3", "deepseek_r1", "<think>hm</think>yes", ("hm", "yes")),
        ("qwen3", "qwen3", "<think>\nhm\n</think>\n\nyes", ("hm", "yes")),
        ("qwen3", "qwen3", "yes", ("", "yes")),
        ("qwen3", "qwen3", "<think>hm", ("hm", "")),
    ],
)
def test_thoughts_begin_where_template_and_parser_say(tiny, family, parser, text, expected):
    """The template's own mark counts first."""
    chat = form_of(tiny, family, reasoning_parser=parser)
    call = call_of(None)
    reader = chat.reasoning_reader(call)
    assert reader
    tokens = chat._tokenizer.encode(text)
    reader.count(tuple(tokens))
    parts = [reader.push(chat.decode(call, tokens)), reader.flush()]
    assert tuple(map("".join, zip(*parts, strict=True))) == expected
    assert reader.tokens == (
        0
        if not expected[0]
        else len(chat._tokenizer.encode(text.split("</think>")[0].removeprefix("<think>")))
    )


def test_a_switch_of_the_template_ends_the_thoughts_before_they_begin(tiny):
    """Qwen3's way not to think. Guards an answer that is taken for thoughts."""
    chat = form_of(tiny, "qwen3", reasoning_parser="deepseek_r1")
    call = call_of(None, switches=(("enable_thinking", False),))
    reader = chat.reasoning_reader(call)
    assert reader
    assert reader.push("hm</think>yes") == ("", "hm</think>yes")


@pytest.mark.parametrize(
    ("family", "parser", "right", "wrong"),
    [
        ("deepseek-r1", "deepseek_r1", "well {\n</think>\n\n", ""),
        ("qwen3", "qwen3", "<think>well {</think>", "well"),
        ("qwen3", "qwen3", "", "<think>"),
    ],
)
def test_the_grammar_begins_behind_the_thoughts(tiny, family, parser, right, wrong):
    """As in vLLM: of a schema, of required calls, and of free text with calls."""
    chat = form_of(tiny, family, reasoning_parser=parser)
    schema = compiled(chat, call_of(None, schema=PARAMETERS))
    assert follows(chat, schema, right + '{"a": 1}')
    assert not follows(chat, schema, wrong + '{"a": 1}')
    assert not follows(chat, schema, right + "hello")
    must = compiled(chat, call_of(Tools((ADD,), is_required=True)))
    assert follows(chat, must, right + ONE["qwen3"])
    assert not follows(chat, must, right + "hello")
    free = compiled(chat, call_of())
    assert follows(chat, free, f"{right}hello {ONE['qwen3']}")
    assert not follows(chat, free, right + ONE["qwen3"].replace('"a"', '"b"'))


def test_a_model_may_think_where_nobody_reads_its_thoughts(tiny):
    """Guards a grammar of free text that forbids the mark, which is a token of its own."""
    chat = form_of(tiny, "qwen3")
    assert follows(chat, compiled(chat, call_of()), f"<think>hm</think>yes {ONE['qwen3']}")


def answered(chat: ChatFormat, steps: list[tuple[int, ...]], stop: tuple[str, ...] = ()) -> Answer:
    """What a reply has of an answer of these steps."""
    call = call_of(stop=stop, shows_reasoning=True, reply=ReplyForm(is_streamed=False))
    writer = ReplyWriter(call)
    request = Request("id-0", (1,), ExactMode(), Sampling(), 100, frozenset())
    output = OutputProcessor(
        call,
        request,
        0,
        partial(chat.decode, call),
        lambda token, logprob: TokenText("", (), logprob),
        writer,
        ReplicaCounters(ServeJob(checkpoint="x")),
        chat.tool_reader(call, "id-0"),
        chat.reasoning_reader(call),
    )
    for forward, tokens in enumerate(steps, start=1):
        is_last = forward == len(steps)
        done = Completion("id-0", (), (), forward, "stop") if is_last else None
        output.process([TokenEvent("id-0", tokens, forward, done)])
    (answer,) = writer._answers
    return replace(answer, forwards=[])


@pytest.mark.parametrize("family", [*ONE, "deepseek-r1"])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_the_steps_of_an_answer_do_not_matter(tiny, family, stop):
    """Its tokens cut in two at every place, and one by one: text, calls, thoughts and their count.
    Guards a mark, or a character, that is missed because two steps have written it."""
    parsers = {"tool_parser": "hermes"} if family == "plain" else {}
    text = f"Grüße: {TWO.get(family) or ONE.get(family) or ONE['qwen3']}"
    if family in ("qwen3", "deepseek-r1"):
        parsers["reasoning_parser"] = "qwen3"
        text = ("<think>" if family == "qwen3" else "") + f"hm 😀\n</think>\n{text}"
    chat = form_of(tiny, family, **parsers)
    tokens = tuple(chat._tokenizer.encode(text))
    whole = answered(chat, [tokens], stop)
    assert whole.text == "Grüße:"
    assert [call.name for call in whole.calls] == (["add", "now"] if family in TWO else ["add"])
    assert whole.finish
    assert whole.finish.reason == "tool_calls"
    assert whole.reasoning == ("hm 😀" if parsers.get("reasoning_parser") else "")
    assert bool(whole.finish.reasoning_tokens) == bool(whole.reasoning)
    ways = [[tokens[:place], tokens[place:]] for place in range(1, len(tokens))]
    for steps in (*ways, [(token,) for token in tokens]):
        assert replace(answered(chat, steps, stop), finish=None) == replace(whole, finish=None)
    assert answered(chat, ways[0], stop).finish == replace(whole.finish, forwards=2, served=ANY)


def test_a_reasoning_parser_needs_its_tokens(tiny):
    """Else nothing would ever be told apart."""
    with pytest.raises(ModelError, match="<think> and </think>"):
        form_of(tiny, "plain", reasoning_parser="qwen3")
