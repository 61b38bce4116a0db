"""The requests that `replies.py` sends: of every kind, each named, all greedy or with a seed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Limits of the recorded service.
BODY_BYTES = 20_000
BODY_S = 1.0
_ALL, _SMALL = "a-key-for-everything", "a-key-for-little-only"
KEYS = f"""
[[keys]]
name = "all"
key = "{_ALL}"
[[keys]]
name = "small"
key = "{_SMALL}"
answers = 2
new_tokens = 8
models = ["second"]
"""
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
# From the built-in corpus, so that a model trained on it can answer.
_QUESTION = "Oscar has 6 bags with 6 lemons in each bag. How many lemons does Oscar have?"
_PROMPTS = (
    _QUESTION,
    "Leo gives 3 marbles to each of 7 friends. How many marbles does Leo give away?",
)
_UNICODE = (
    "Grüße aus Köln: wie viele Äpfel?",
    "你好, 有多少个苹果",
    "سلام، کم تفاحة؟",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b\ufeff",
    "<|im_end|><|im_start|>system\n<mask>",
    'tab\tline\r\nnul\u0000 quote" back\\slash </script>',
    "\U0001d54f\U0001d550 ½ ﬁ İ ß",
    "",
)
_MODES: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "exact"},
    *({"mode": "verified", "threshold": threshold} for threshold in (1, 0.5, 0.1, 0)),
    {"mode": "verified", "window": 2},
    {"threshold": 0.3},
    *({"mode": "confidence", "threshold": threshold} for threshold in (1, 0.9, 0.6, 0)),
    {"mode": "confidence", "window": 3},
    {"mode": "jacobi"},
    {"mode": "jacobi", "window": 4},
    {"quality": "lossless"},
    {"quality": "balanced"},
    {"quality": "fast"},
    {"quality_budget": 0},
    {"quality_budget": 0.05},
)
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Köln", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "ü", 3, None]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
_CALLED = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            for id_ in ("one", "two")
        ],
    },
    {"role": "tool", "tool_call_id": "two", "content": "rain"},
    {"role": "tool", "tool_call_id": "one", "content": [{"type": "text", "text": "sun"}]},
]


@dataclass(frozen=True, slots=True)
class Case:
    """One request, as bytes for the socket."""

    name: str
    kind: str  # kind of its reply, if that is no error
    method: str
    path: str
    raw: bytes
    by_step: bool = False  # a stream with a chunk for each step

    def shown(self) -> str:
        """The beginning of the request, for readers of the recording."""
        return self.raw[:2000].decode("utf-8", "backslashreplace")


def cases() -> list[Case]:
    """All cases in the order in which they are sent, which is always the same."""
    made = [
        *_decoding(),
        *_sampling(),
        *_several(),
        *_fields(),
        *_structured(),
        *_conversations(),
        *_plain(),
        *_bad_bodies(),
        *_bad_requests(),
        *_raw(),
    ]
    assert len({case.name for case in made}) == len(made), "two requests have one name"
    return made


def _request(
    name: str,
    path: str,
    body: Any = None,
    *,
    kind: str = "other",
    method: str | None = None,
    key: str | None = _ALL,
    headers: dict[str, str] | None = None,
    by_step: bool = False,
) -> Case:
    """A case. `body` is an object to encode as JSON, or bytes to send unchanged."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    sent = {"Host": "127.0.0.1", "Connection": "close"}
    if key:
        sent["Authorization"] = f"Bearer {key}"
    if body is not None:
        sent |= {"Content-Type": "application/json", "Content-Length": str(len(raw))}
    sent |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{field}: {value}" for field, value in sent.items())]
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    return Case(name, kind, method, path, head + (raw if body is not None else b""), by_step)


def _answer(name: str, path: str, **fields: Any) -> Case:
    """A request for an answer to the first question, changed by the fields."""
    body: dict[str, Any] = {"model": "first", "max_tokens": 24, "temperature": 0}
    if path == _CHAT:
        body["messages"] = [{"role": "user", "content": _QUESTION}]
    else:
        body["prompt"] = _QUESTION
    key = fields.pop("key", _ALL)
    body |= fields
    is_stream = fields.get("stream") is True
    by_step = fields.get("return_forwards") is True
    kind = "streams" if is_stream else "replies"
    return _request(name, path, body, kind=kind, key=key, by_step=by_step)


def _both(name: str, path: str, **fields: Any) -> Iterator[Case]:
    """The request twice: for a whole answer, and for a stream."""
    yield _answer(name, path, **fields)
    yield _answer(f"{name}, streamed", path, stream=True, **fields)


def _decoding() -> Iterator[Case]:
    """Every mode, threshold and class of quality, in both APIs, as whole answers and by step."""
    for number, mode in enumerate(_MODES):
        how = ", ".join(f"{name} {value}" for name, value in mode.items()) or "the default mode"
        yield from _both(f"chat: {how}", _CHAT, **mode, max_tokens=40)
        yield _answer(f"completion: {how}", _TEXT, **mode, prompt=_PROMPTS[number % 2])
        yield _answer(
            f"chat by step: {how}",
            _CHAT,
            **mode,
            messages=[{"role": "user", "content": _PROMPTS[1]}],
            stream=True,
            stream_options={"include_usage": True},
            return_forwards=True,
            max_tokens=40,
        )


def _sampling() -> Iterator[Case]:
    """Sampled answers with seeds, and options that change the probabilities."""
    for seed, fields in enumerate(
        (
            {"temperature": 1},
            {"temperature": None},
            {"temperature": 2, "top_k": 5},
            {"temperature": 0.7, "top_p": 0.8},
            {"temperature": 1, "min_p": 0.05},
            {"temperature": 1, "repetition_penalty": 1.3},
            {"temperature": 1, "presence_penalty": 1.5, "frequency_penalty": -0.5},
            {"temperature": 1, "min_tokens": 20},
            {"temperature": 1, "mode": "exact"},
            {"temperature": 1, "mode": "confidence", "threshold": 0.5},
            {"temperature": 1, "mode": "jacobi"},
        )
    ):
        how = ", ".join(f"{name} {value}" for name, value in fields.items())
        path = (_CHAT, _TEXT)[seed % 2]
        yield from _both(f"seed {seed - 3}: {how}", path, seed=seed - 3, **fields)
    yield _answer("biases", _CHAT, logit_bias={"5": 100, "70": -100}, max_tokens=4)
    yield _answer("greedy with penalties", _TEXT, repetition_penalty=2, presence_penalty=2)


def _several() -> Iterator[Case]:
    """Several answers, several prompts, and usage in streams."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    yield from _both("three answers", _CHAT, n=3, temperature=1, seed=4)
    yield _answer("three answers, usage", _CHAT, n=3, temperature=1, seed=4, **usage)
    yield _answer(
        "three answers, forwards", _CHAT, n=3, temperature=1, seed=4, return_forwards=True
    )
    yield from _both("two texts", _TEXT, prompt=list(_PROMPTS))
    yield _answer("two texts, two answers each", _TEXT, prompt=list(_PROMPTS), n=2, seed=9)
    yield _answer("two texts, usage", _TEXT, prompt=list(_PROMPTS), **usage)
    yield from _both("tokens", _TEXT, prompt=[40, 41, 42, 43])
    yield from _both("lists of tokens", _TEXT, prompt=[[40, 41], [50, 51, 52]])
    yield _answer("usage", _CHAT, **usage)
    yield _answer("usage of a text", _TEXT, **usage)
    yield _answer("no usage", _TEXT, stream=True, stream_options={"include_usage": False})
    yield _answer("forwards", _CHAT, return_forwards=True)
    yield _answer("forwards of a text, by step", _TEXT, return_forwards=True, stream=True)


def _fields() -> Iterator[Case]:
    """Log-probabilities, ends, lengths, names, and texts in many scripts."""
    for top in (None, 0, 1, 5):
        yield from _both(f"logprobs {top}", _CHAT, logprobs=True, top_logprobs=top)
        yield from _both(f"text logprobs {top}", _TEXT, logprobs=top)
    yield _answer("logprobs by step", _CHAT, logprobs=True, stream=True, return_forwards=True)
    for stops in (".", ["=", "has"], ["never, ever"], []):
        yield from _both(f"stops {stops}", _CHAT, stop=stops, max_tokens=60)
        yield _answer(f"text stops {stops}", _TEXT, stop=stops, max_tokens=60)
    yield _answer("one token", _CHAT, max_tokens=1)
    yield _answer("as long as it likes", _CHAT, max_tokens=None)
    yield _answer("the other name of the limit", _CHAT, max_tokens=None, max_completion_tokens=9)
    yield _answer("a completion of default length", _TEXT, max_tokens=None)
    yield _answer("the second model", _CHAT, model="second")
    yield _answer("a key for little", _CHAT, model="second", max_tokens=None, key=_SMALL)
    yield _answer("a user and a time", _CHAT, user="somebody", timeout_s=60)
    nulls = ("top_p", "top_k", "stop", "seed", "stream", "n", "mode", "window", "quality")
    yield _answer("nulls", _CHAT, **dict.fromkeys(nulls))
    for number, text in enumerate(_UNICODE):
        message = [{"role": "user", "content": text}]
        yield from _both(f"text {number}", _CHAT, messages=message, user=text[:20])
        yield _answer(f"text {number}, sampled", _TEXT, prompt=text or " ", temperature=2, seed=1)


def _structured() -> Iterator[Case]:
    """JSON, schemas and tools. Penalties keep small models from writing only white space."""
    penalties = {"repetition_penalty": 5, "frequency_penalty": 2, "max_tokens": 200}
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    for form in ({"type": "text"}, {"type": "json_object"}, schema):
        for mode in ("verified", "exact", "confidence"):
            fields = {"response_format": form, "mode": mode}
            what = f"format {form['type']}, {mode}"
            yield from _both(what, _CHAT, **fields, **penalties)
            yield _answer(f"{what}, cut", _CHAT, **fields)
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("none", "auto", "required", named):
        fields = {"tools": [_WEATHER, _TIME], "tool_choice": choice} | penalties
        what = f"tools {choice if isinstance(choice, str) else 'named'}"
        yield from _both(what, _CHAT, **fields)
        one = {"temperature": 1, "seed": 3, "parallel_tool_calls": False}
        yield from _both(f"{what}, sampled, one", _CHAT, **fields, **one)
    fields = {"tools": [_WEATHER], "tool_choice": "required"} | penalties
    yield _answer("tools by step", _CHAT, **fields, stream=True, return_forwards=True)
    yield _answer("tools with logprobs", _CHAT, **fields, logprobs=True, top_logprobs=1)
    yield _answer("tools, two answers", _CHAT, **fields, n=2, temperature=1, seed=5)
    yield _answer("tools, cut", _CHAT, **fields | {"max_tokens": 60})


def _conversations() -> Iterator[Case]:
    """Conversations of several messages."""
    parts = [{"type": "text", "text": "How many "}, {"type": "text", "text": "apples?"}]
    talks: dict[str, list[dict[str, Any]]] = {
        "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "developer": [{"role": "developer", "content": "Ü"}, {"role": "user", "content": parts}],
        "turns": [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": "24", "refusal": None, "annotations": None},
            {"role": "user", "content": "Why?"},
        ],
        "results of tools": _CALLED,
        "an answer to go on with": [*_CALLED[:1], {"role": "assistant", "content": "It"}],
    }
    for name, messages in talks.items():
        yield from _both(f"conversation: {name}", _CHAT, messages=messages)
        count = {"model": "first", "messages": messages}
        yield _request(f"tokens of the conversation: {name}", "/tokenize", count)


def _plain() -> Iterator[Case]:
    """Routes that need no engine, and token counts."""
    for path in ("/", "/healthz", "/readyz"):
        yield _request(f"{path} without a key", path, key=None)
    for path in ("/version", "/v1/models", "/v1/mars/status", "/metrics", "/openapi.json"):
        kind = "the description" if path == "/openapi.json" else "other"
        yield _request(path, path, kind=kind)
        yield _request(f"{path} with a key for little", path, kind=kind, key=_SMALL)
        yield _request(f"{path} without a key", path, key=None)
    for text in _UNICODE:
        yield _request(f"tokens of {text!r}", "/tokenize", {"model": "first", "prompt": text})
    yield _request("tokens for the only model", "/tokenize", {"prompt": "x"}, key=_SMALL)
    for tokens in ([], [40, 41, 300], [0, 1, 2, 3, 4]):
        body = {"model": "second", "tokens": tokens}
        yield _request(f"the text of {tokens}", "/detokenize", body)


def _bad_bodies() -> Iterator[Case]:
    """Every rule of the bodies broken once."""
    user = {"role": "user", "content": "x"}
    image = {"role": "user", "content": [{"type": "image_url", "text": ""}]}
    guided = {"name": "x", "schema": {"x-guidance": {"lenient": True}}}
    no_type = {"name": "x", "schema": {"type": 7}}
    chats: tuple[dict[str, Any], ...] = (
        *({"messages": messages} for messages in ([], None, "x", [3], [{}], [user] * 513, [image])),
        *(
            {"messages": [user | more]}
            for more in ({"content": None}, {"content": 3}, {"name": "y"})
        ),
        *({"messages": [{"role": role, "content": "x"}]} for role in ("tool", "function", 3)),
        {"messages": [{"role": "assistant"}]},
        {"messages": [*_CALLED[:2], {"role": "tool", "tool_call_id": "no", "content": ""}]},
        *({"model": model} for model in (3, None, "third", "", "first ")),
        *({"temperature": value} for value in ("0.5", True, 2.1, -1)),
        *({"top_p": value} for value in (0, 1.1)),
        {"top_k": -1},
        {"min_p": 2},
        {"seed": 2**63},
        *({"max_tokens": value} for value in (0, 1.5, 301, "7")),
        {"max_completion_tokens": 301},
        {"max_tokens": 2, "max_completion_tokens": 3},
        {"min_tokens": 9, "max_tokens": 8},
        {"min_tokens": 301},
        *({"n": value} for value in (0, 17)),
        {"logprobs": 1},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        *({"logit_bias": {key: value}} for key, value in (("x", 1), ("5", 101), ("05", 1))),
        {"logit_bias": {"99999": 1}},
        *({"stop": value} for value in (["a"] * 5, "", [""], 3, ["a", 3], "x" * 257)),
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"x": 1}},
        {"stream": "yes"},
        {"user": "x" * 257},
        *({"mode": mode} for mode in ("block_cached", "nonsense", 1)),
        {"threshold": 1.5},
        {"mode": "exact", "window": 2},
        {"mode": "exact", "threshold": 0.9},
        {"mode": "jacobi", "threshold": 0.5},
        {"window": 0},
        {"window": 65},
        {"quality": "best"},
        {"quality": "fast", "threshold": 0.5},
        {"quality_budget": 0.1, "quality": "fast"},
        {"quality_budget": 2},
        *({"timeout_s": value} for value in (0, 601)),
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": guided}},
        {"response_format": {"type": "json_schema", "json_schema": no_type}},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"tools": [_TIME, _TIME]},
        {"tools": [{"type": "retrieval"}]},
        {"tools": [_TIME], "tool_choice": {"type": "function", "function": {"name": "none"}}},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        *({name: 1} for name in ("audio", "best_of", "store", "treshold", "ünknown")),
        {"messages": [{"role": "user", "content": "word " * 2000}]},
    )
    for number, fields in enumerate(chats):
        yield _answer(f"bad chat {number}: {json.dumps(fields)[:60]}", _CHAT, **fields)
    texts: tuple[dict[str, Any], ...] = (
        *(
            {"prompt": prompt}
            for prompt in ([], [[]], [1, "a"], [-1], 3, None, ["a"] * 17, [[1], 2])
        ),
        {"prompt": [1 << 30]},
        *({name: value} for name, value in (("echo", True), ("logprobs", True), ("logprobs", 21))),
        {"messages": []},
        {"max_completion_tokens": 3},
        {"tools": []},
    )
    for number, fields in enumerate(texts):
        yield _answer(f"bad completion {number}: {json.dumps(fields)[:60]}", _TEXT, **fields)
    for fields in (
        {},
        {"prompt": "x", "messages": [user]},
        {"prompt": 3},
        {"prompt": "x"},
        {"x": 1},
    ):
        yield _request(f"bad tokenize: {json.dumps(fields)[:40]}", "/tokenize", fields)
    for fields in ({}, {"tokens": [-1]}, {"model": "first", "tokens": [1 << 40]}, {"tokens": "x"}):
        yield _request(f"bad detokenize: {json.dumps(fields)}", "/detokenize", fields)
    bodies = (
        b"", b"{", b"\xff\xfe", b"[]", b'"x"', b"null", b"3", b'{"model":"\\ud800"}', b"[" * 9999,
        b'{"a":' * 600 + b"1" + b"}" * 600, b'{"model":"first","model":"first"}',
        b'{"model":"first","messages":[{"role":"user","content":"x"}],"n":1,"n":1}',
        b'{"model":"first","messages":[{"role":"user","content":"x","content":"y"}]}',
        b'{"model":"first","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"model":"first","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
        b'{"model":"first"}', b'{"messages":[{"role":"user","content":"x"}]}',
        b'{"model":"first","messages":[{"role":"user","content":"\\ud83d"}]}',
    )  # fmt: skip
    for number, body in enumerate(bodies):
        for path in (_CHAT, _TEXT):
            yield _request(f"bad bytes {number} to {path}: {body[:30]!r}", path, body)


def _bad_requests() -> Iterator[Case]:
    """Wrong keys, methods, paths and sizes."""
    chat = {"model": "first", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for key in (None, "wrong", _ALL[:-1]):
        yield _request(f"key {key}", _CHAT, chat, key=key)
    yield _request("another scheme", _CHAT, chat, key=None, headers={"Authorization": "Basic eDp5"})
    yield _request("a key for another model", _CHAT, chat, key=_SMALL)
    yield _answer("more tokens than the key's", _CHAT, model="second", max_tokens=9, key=_SMALL)
    yield _answer(
        "more answers than the key's", _CHAT, model="second", n=3, max_tokens=2, key=_SMALL
    )
    for method, path in (
        ("GET", _CHAT), ("PUT", _TEXT), ("DELETE", "/v1/models"), ("POST", "/healthz"),
        ("HEAD", "/healthz"), ("OPTIONS", _CHAT), ("PATCH", "/tokenize"), ("GET", "/none"),
        ("POST", "/v1/embeddings"), ("GET", "/v1/models/first"), ("GET", "/v1/chat/completions/"),
        ("GET", "/%ff%00%0d%0a"), ("GET", "/docs"), ("GET", "/v1/models?x=1"),
    ):  # fmt: skip
        yield _request(f"{method} {path}", path, method=method)
    large = {**chat, "messages": [{"role": "user", "content": "x" * BODY_BYTES}]}
    yield _request("a body that is too large", _CHAT, large)


def _raw() -> Iterator[Case]:
    """Bytes that no client would send."""
    body = b'{"model":"first","messages":[{"role":"user","content":"x"}],"temperature":0}'
    whole = _request("", _CHAT, body).raw
    length = b"Content-Length: %d" % len(body)
    chunked = whole.replace(length, b"Transfer-Encoding: chunked").removesuffix(body)
    for name, raw in {
        "no HTTP": b"nonsense\r\n\r\n",
        "HTTP/1.0": b"GET /none HTTP/1.0\r\n\r\n",
        "a negative length": whole.replace(length, b"Content-Length: -1"),
        "a length that is no number": whole.replace(length, b"Content-Length: x"),
        "an announced body that is too large": whole.replace(length, b"Content-Length: 999999999"),
        "less than was announced": whole.replace(length, b"Content-Length: 500"),
        "a body in chunks": chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        "chunks that are too large": chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (30_000, b"x" * 30_000),
        "no length": whole.replace(length + b"\r\n", b"").removesuffix(body),
        "a long head": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n" % (b"x" * 70_000),
    }.items():
        yield Case(f"raw: {name}", "other", "POST", _CHAT, raw)
