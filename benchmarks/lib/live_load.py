"""The clients of a live run, in a process of their own so that nothing else delays them."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from lib.load_client import Client, Streamed

NAME = "live"
_NEW_TOKENS = 128
_AGAIN_S, _BROKEN_S = 1.0, 0.05  # wait after a refusal, and after a broken stream


@dataclass(slots=True)
class Asked:
    """One request; times are seconds since the beginning of the run."""

    at_s: float
    prompt_tokens: int
    is_pinned: bool
    first_s: float = 0.0
    end_s: float = 0.0
    tokens: int = 0
    threshold: float | None = None
    cut: int = 0  # streams that broke off and were requested again
    refused: int = 0

    @property
    def pace_s(self) -> float:
        """Seconds per token after the first."""
        return (self.end_s - self.first_s) / max(1, self.tokens - 1)


def load(url: str, rows: list[Asked], questions: list[str], begin: float) -> list[Asked]:
    """Sends each request at its time; `begin` is their common start on `time.perf_counter`."""
    return asyncio.run(_load(url, rows, questions, begin))


async def _load(url: str, rows: list[Asked], questions: list[str], begin: float) -> list[Asked]:
    pairs = zip(rows, questions, strict=True)
    await asyncio.gather(*(_ask(url, row, question, begin) for row, question in pairs))
    return rows


async def _ask(url: str, row: Asked, question: str, begin: float) -> None:
    """Asks until an answer is whole: again at once after a broken stream, later after a refusal."""
    await asyncio.sleep(max(0.0, begin + row.at_s - time.perf_counter()))
    body: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": _NEW_TOKENS,
    }
    if row.is_pinned:
        body["threshold"] = 1.0
    while True:
        asked_s = time.perf_counter()
        client = Client(url)
        try:
            done: Streamed = await client.chat(body)
        except (RuntimeError, KeyError, OSError, asyncio.IncompleteReadError) as error:
            is_refusal = " 429 " in str(error) or " 503 " in str(error)
            row.refused += is_refusal
            row.cut += not is_refusal
            await asyncio.sleep(_AGAIN_S if is_refusal else _BROKEN_S)
            continue
        finally:
            client.close()
        row.first_s = asked_s + done.first_s - begin
        row.end_s = asked_s + done.total_s - begin
        row.tokens, row.threshold = done.tokens, done.threshold
        return
