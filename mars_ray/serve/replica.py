"""A replica as a Serve deployment: one process, one engine in a thread of its own."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from mars_ray.config.serve import ServeJob
from mars_ray.decode.engine import load_engine
from mars_ray.serve.chat import ChatEngine
from mars_ray.serve.messages import ChatCall, Message


class Replica:
    """Answers calls with its own copy of the model."""

    def __init__(self, job: ServeJob) -> None:
        engine, tokenizer = load_engine(job.checkpoint, job.engine)
        self._chat = ChatEngine(engine, tokenizer, job)
        self._chat.start()

    async def generate(self, call: ChatCall) -> AsyncGenerator[Message, None]:
        """The messages of one answer; Serve closes the generator when the caller is gone."""
        async with aclosing(self._chat.answer(call)) as messages:
            async for message in messages:
                yield message

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        self._chat.check_health()

    def open_calls(self) -> int:
        """Calls being answered or waiting."""
        return self._chat.open_calls
