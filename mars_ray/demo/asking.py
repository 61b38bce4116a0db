"""A question to a service, sent as any client would."""

import json
from urllib.request import Request

from rich.console import Console

from mars_ray.cluster.direct import urlopen

_ANSWER_S = 60.0


def ask(url: str, question: str, max_tokens: int, console: Console) -> str:
    """Ask greedily, show question, answer and usage, and return the answer's text. Raises
    OSError."""
    body = {
        "model": _first_model(url),
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    request = Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, _ANSWER_S) as reply:
        answer = json.load(reply)
    text = answer["choices"][0]["message"]["content"]
    console.print(f"[bold]question[/] {question}\n[bold]answer[/]   {text}")
    console.print(f"[bold]usage[/]    {json.dumps(answer['usage'])}")
    return text


def _first_model(url: str) -> str:
    with urlopen(Request(f"{url}/v1/models"), _ANSWER_S) as reply:
        return json.load(reply)["data"][0]["id"]
