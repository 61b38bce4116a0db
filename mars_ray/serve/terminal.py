"""`mars-ray chat`: a conversation in the terminal with any running service."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from mars_ray.cluster.direct import urlopen
from mars_ray.errors import EngineError

_HELP = """/model NAME   the one to ask; without a name: which there are
/mode exact|verified|confidence|default   how to decode
/threshold 0.9|default   quality against speed
/system TEXT   instructions before the conversation
/new   forget the conversation
/quit   or Ctrl-D; Ctrl-C ends an answer"""
# Tokens of one forward share a shade; two shades in turn show where forwards end.
_SHADES = ("", "reverse dim")
_CONNECT_S = 600.0


@dataclass(slots=True)
class Conversation:
    """What was said, and how the next answer is asked for."""

    url: str
    model: str
    api_key: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def ask(self, text: str) -> Iterator[dict[str, Any]]:
        """The chunks of the answer, which is remembered as far as it was read."""
        self.messages.append({"role": "user", "content": text})
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_forwards": True,
        }
        said = ""
        try:
            for chunk in _events(self.url, body | self.settings, self.api_key):
                for choice in chunk["choices"]:
                    said += choice["delta"].get("content", "")
                yield chunk
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": said})
            else:
                self.messages.pop()


def models(url: str, api_key: str | None) -> list[str]:
    """The service's models. Raises EngineError if there is no such service."""
    with _open(f"{url}/v1/models", None, api_key) as reply:
        return [model["id"] for model in json.load(reply)["data"]]


def chat(url: str, api_key: str | None, console: Console) -> None:
    """Until the user leaves. Raises EngineError if the service cannot be reached."""
    url = url.rstrip("/").removesuffix("/v1")
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
        if text.startswith("/"):
            console.print(_command(conversation, text), style="dim")
        elif text:
            _show(conversation, text, console)


def _command(conversation: Conversation, text: str) -> str:
    name, _, value = text.partition(" ")
    match name, value.strip():
        case "/new", "":
            conversation.messages.clear()
            return "a new conversation"
        case "/system", content if content:
            conversation.messages[:] = [{"role": "system", "content": content}]
            return "a new conversation with these instructions"
        case "/model", chosen:
            return _choose_model(conversation, chosen)
        case "/mode" | "/threshold", "default":
            conversation.settings.pop(name[1:], None)
        case "/mode", mode if mode:
            conversation.settings["mode"] = mode
        case "/threshold", number if _is_number(number):
            conversation.settings["threshold"] = float(number)
        case _:
            return _HELP
    settings = conversation.settings or "the service's own"
    return f"settings: {settings}"


def _choose_model(conversation: Conversation, chosen: str) -> str:
    try:
        names = models(conversation.url, conversation.api_key)
    except EngineError as error:
        return str(error)
    if chosen in names:
        conversation.model = chosen
    return f"asking {conversation.model}; there are {', '.join(names)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _show(conversation: Conversation, text: str, console: Console) -> None:
    started = time.perf_counter()
    usage = None
    try:
        for number, chunk in enumerate(conversation.ask(text)):
            for choice in chunk["choices"]:
                piece = Text(choice["delta"].get("content", ""), style=_SHADES[number % 2])
                console.print(piece, end="", soft_wrap=True)
            usage = chunk.get("usage") or usage
    except KeyboardInterrupt:
        console.print(" [ended]", style="dim", markup=False, end="")
    except EngineError as error:
        console.print(str(error), style="red", markup=False, end="")
    console.print()
    if usage:
        seconds = time.perf_counter() - started
        mars = usage["mars"]
        tokens = usage["completion_tokens"]
        console.print(
            f"{tokens} tokens, {tokens / seconds:.0f} a second, "
            f"{mars['tokens_per_forward']:.2f} a forward, {mars['mode']}"
            + (f" at {mars['threshold']:g}" if mars["threshold"] is not None else ""),
            style="dim",
        )


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
        return urlopen(request, _CONNECT_S)
    except urllib.error.HTTPError as error:
        raise EngineError(f"{url}: {_message(error)}") from error
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{url} cannot be reached: {error}; does a service run there (`mars-ray serve`)?"
        ) from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
