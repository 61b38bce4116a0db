"""A model that writes a given text, as if several tokens had come of every forward."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

from mars_ray.serve.protocol import Envelope, Finish, GenerationRequest, Message, OutputDelta, Used
from mars_ray.serve.replica.llm_server import LLMServer
from mars_ray.serve.replica.output_processor import reply_writer

_TOKENS = (1, 3, 2, 5, 4)  # of one forward after the other
_CHARS = 4  # of a token


class Writing:
    """Everything but its answers is that of another model; an endless one never finishes, one with
    a gate goes on behind its first piece once that is released."""

    def __init__(
        self,
        other: LLMServer,
        text: str,
        *,
        is_endless: bool = False,
        gate: threading.Semaphore | None = None,
    ) -> None:
        self._other = other
        self._text = text
        self._is_endless = is_endless
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Message, None]:
        """The text in pieces, each of one forward; in mode `exact` of one token."""
        writer = reply_writer(request)
        at = tokens = forwards = 0
        while at < len(self._text):
            step = 1 if request.mode.type == "exact" else _TOKENS[forwards % len(_TOKENS)]
            piece = self._text[at : at + step * _CHARS]
            at, tokens, forwards = at + len(piece), tokens + step, forwards + 1
            text = writer.write(OutputDelta(piece, forward=forwards, tokens=step))
            yield Envelope(text, Used(9, 0, tokens, forwards))
            await asyncio.sleep(0.002)
            if self._gate and forwards == 1:
                await asyncio.to_thread(self._gate.acquire)
        if self._is_endless:
            await asyncio.Event().wait()
        finish = Finish("stop", 9, tokens + 1, forwards + 1)
        text = writer.write(OutputDelta("", finish, 0, forwards + 1, 1))
        yield Envelope(text + writer.end(), Used(9, 0, tokens + 1, forwards + 1), "stop")
