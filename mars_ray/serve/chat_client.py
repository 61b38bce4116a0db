"""`mars-ray chat`, a conversation with a running service in the terminal, and `mars-ray status`."""

import http.client
import json
import secrets
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mars_ray.cluster.machine import urlopen
from mars_ray.errors import EngineError

_HELP = """/model NAME   the one to ask; without a name: which there are
/mode exact|verified|confidence|default   how to decode
/threshold 0.9|default   quality against speed
/temperature 0.7|default   0 until then: the likeliest token; the service's own is 1
/compare   ask the last question again in mode exact: how much faster the answer was
/system TEXT   instructions before the conversation
/new   forget the conversation
/quit   or Ctrl-D; Ctrl-C ends an answer"""
# Tokens of one forward are underlined together, in two colours in turn, so that the border between
# two forwards is visible. A single token is plain.
_TOGETHER = ("underline cyan", "underline green")
_BAR = 32  # columns of the faster bar


@dataclass(slots=True)
class Conversation:
    """The conversation so far, and the settings of the next request."""

    url: str
    model: str
    api_key: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    seed: int = 0  # of the last question, so that it can be repeated
    last: "Answered | None" = None  # the answer to it
    means: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def ask(self, text: str) -> Iterator[dict[str, Any]]:
        """Yields the chunks of the answer; as much as is read of it joins the conversation."""
        self.messages.append({"role": "user", "content": text})
        self.seed = secrets.randbits(31)
        said = ""
        try:
            for chunk in self.chunks(self.messages, self.settings):
                for choice in chunk["choices"]:
                    said += choice["delta"].get("content", "")
                yield chunk
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": said})
            else:
                self.messages.pop()

    def chunks(
        self, messages: list[dict[str, str]], settings: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yields the chunks of an answer with the last seed; the conversation stays as it is."""
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_forwards": True,
            "seed": self.seed,
        }
        return _events(self.url, body | settings, self.api_key)

    def mean(self, usage: dict[str, Any]) -> str:
        """Tokens per forward over all answers decoded like this one; empty for the first."""
        mars = usage["mars"]
        key = repr([self.model, *(mars[name] for name in ("mode", "threshold", "adapter"))])
        sums = self.means[key]
        sums.update(answers=1, tokens=usage["completion_tokens"], forwards=mars["forwards"])
        if sums["answers"] < 2:
            return ""
        return f" ({sums['tokens'] / sums['forwards']:.2f} over {sums['answers']} answers)"


@dataclass(frozen=True, slots=True)
class Answered:
    """A finished answer. The rate is in tokens per second from the first tokens on, because the
    time for the prompt is the same in every mode."""

    messages: list[dict[str, str]]  # up to and including the question
    text: str
    rate: float
    usage: dict[str, Any]

    @property
    def how(self) -> str:
        """The mode, with its threshold and the draft adapter in force."""
        mars = self.usage["mars"]
        threshold = "" if mars["threshold"] is None else f" at {mars['threshold']:g}"
        adapter = "" if mars["adapter"] is None else f" with {mars['adapter']}"
        return mars["mode"] + threshold + adapter


def models(url: str, api_key: str | None) -> list[str]:
    """The service's models. Raises EngineError if there is no such service."""
    with _open(f"{url}/v1/models", None, api_key) as reply:
        return [model["id"] for model in json.load(reply)["data"]]


def _base(url: str) -> str:
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def status(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """The models' states, as `GET /v1/mars/status` has them. Raises EngineError."""
    with _open(f"{_base(url)}/v1/mars/status", None, api_key) as reply:
        return json.load(reply)["data"]


def status_table(models: list[dict[str, Any]]) -> Table:
    """One line a model, of what changes while a service runs."""
    table = Table("model", "mode", "threshold", "set-point", "adapter", box=None)
    counts = ("replicas", "running", "waiting", "tokens/s", "tokens/forward", "n-grams", "KV cache")
    for name in counts:
        table.add_column(name, justify="right")
    for model in models:
        words = [model[name] for name in ("id", "mode", "threshold", "set_point", "adapter")]
        numbers = [model[name] for name in ("replicas", "running", "waiting")]
        per_forward, usage = model["tokens_per_forward"], model["kv_cache_usage"]
        table.add_row(
            *("-" if word is None else str(word) for word in (*words, *numbers)),
            f"{model['tokens_per_second']:.0f}",
            "-" if per_forward is None else f"{per_forward:.2f}",
            *("-" if share is None else f"{share:.0%}" for share in (model["ngram_share"], usage)),
        )
    return table


def chat(url: str, api_key: str | None, console: Console) -> None:
    """Talks until the user leaves. Raises EngineError if the service cannot be reached."""
    url = _base(url)
    conversation = Conversation(url, models(url, api_key)[0], api_key)
    console.print(f"{conversation.model} at {url}; /help says what else can be said", style="dim")
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/quit":
            return
        if text == "/compare":
            _compare(conversation, console)
            continue
        if text.startswith("/"):
            console.print(_command(conversation, text), style="dim")
        elif text:
            _show(conversation, text, console)


def _command(conversation: Conversation, text: str) -> str:
    name, _, value = text.partition(" ")
    match name, value.strip():
        case "/new", "":
            conversation.messages.clear()
            conversation.last = None
            return "a new conversation"
        case "/system", content if content:
            conversation.messages[:] = [{"role": "system", "content": content}]
            conversation.last = None
            return "a new conversation with these instructions"
        case "/model", chosen:
            try:
                names = models(conversation.url, conversation.api_key)
            except EngineError as error:
                return str(error)
            if chosen in names:
                conversation.model, conversation.last = chosen, None
            return f"asking {conversation.model}; there are {', '.join(names)}"
        case "/mode" | "/threshold" | "/temperature", "default":
            conversation.settings.pop(name[1:], None)
        case "/mode", mode if mode:
            conversation.settings["mode"] = mode
        case "/threshold" | "/temperature", number:
            try:
                conversation.settings[name[1:]] = float(number)
            except ValueError:
                return _HELP
        case _:
            return _HELP
    settings = conversation.settings or "the service's own"
    return f"settings: {settings}"


def _show(conversation: Conversation, text: str, console: Console) -> None:
    asked = [*conversation.messages, {"role": "user", "content": text}]
    conversation.last = answered = _read(conversation.ask(text), asked, console)
    if answered:
        usage = answered.usage
        figures = (
            f"{usage['completion_tokens']} tokens, {answered.rate:.0f} a second, "
            f"{usage['mars']['tokens_per_forward']:.2f} a forward{conversation.mean(usage)}, "
            f"{answered.how}"
        )
        console.print(figures, style="dim", highlight=False)


def _read(
    chunks: Iterator[dict[str, Any]], asked: list[dict[str, str]], console: Console
) -> Answered | None:
    """Shows an answer as it arrives; returns None if it does not finish."""
    said, usage, tokens, together = "", None, 0, 0
    has_thoughts = False
    first: tuple[float, int] | None = None
    last_s = 0.0
    try:
        for chunk in chunks:
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content", "")
                if thought := choice["delta"].get("reasoning", ""):
                    console.print(Text(thought, style="dim italic"), end="", soft_wrap=True)
                    has_thoughts = True
                if piece and has_thoughts and not said:
                    console.print("\n")
                count = choice["mars"]["tokens"] if "mars" in choice else 0  # of a mere end
                together += count > 1
                style = _TOGETHER[together % 2] if count > 1 else ""
                console.print(Text(piece, style=style), end="", soft_wrap=True)
                said, tokens = said + piece, tokens + count
                if count:
                    last_s = time.perf_counter()
                    first = first or (last_s, tokens)
            usage = chunk.get("usage") or usage
    except KeyboardInterrupt:
        console.print(" [ended]", style="dim", markup=False, end="")
    except EngineError as error:
        console.print(str(error), style="red", markup=False, end="")
    console.print()
    if usage is None or first is None:
        return None
    rate = (tokens - first[1]) / max(1e-3, last_s - first[0])
    return Answered(asked, said, rate, usage)


def _compare(conversation: Conversation, console: Console) -> None:
    """Repeats the last question at one token per forward; the conversation stays as it is."""
    ours = conversation.last
    if ours is None:
        console.print("ask something first: there is no answer to compare with", style="dim")
        return
    settings = conversation.settings | {"mode": "exact"}
    settings.pop("threshold", None)
    exact = _read(conversation.chunks(ours.messages, settings), ours.messages, console)
    if exact is None:
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column("tokens/s", justify="right")
    table.add_column("a forward", justify="right")
    table.add_column()
    most = max(ours.rate, exact.rate, 1e-3)
    for each in (ours, exact):
        bar = "█" * max(1, round(_BAR * each.rate / most))
        per_forward = f"{each.usage['mars']['tokens_per_forward']:.2f}"
        table.add_row(each.how, f"{each.rate:.0f}", per_forward, bar)
    console.print(table)
    same = "the same text" if ours.text == exact.text else "another text"
    times = ours.rate / max(1e-3, exact.rate)
    console.print(f"{times:.2f} times the tokens a second of exact, {same}", highlight=False)


def _events(url: str, body: dict[str, Any], api_key: str | None) -> Iterator[dict[str, Any]]:
    try:
        with _open(f"{url}/v1/chat/completions", body, api_key) as reply:
            for line in reply:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise EngineError(chunk["error"]["message"])
                    yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"the connection was lost within the answer: {error}") from error
    raise EngineError("the service ended the answer before its end")


def _open(url: str, body: dict[str, Any] | None, api_key: str | None) -> Any:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        return urlopen(request, 600.0)
    except urllib.error.HTTPError as error:
        raise EngineError(f"{url}: {_message(error)}") from error
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{url} cannot be reached: {error}; give the address that `mars-ray serve` has printed"
        ) from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
