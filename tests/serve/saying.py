"""A backend that says what it was told to say."""

from collections.abc import AsyncGenerator

from mars_ray.serve.messages import Call, Message, Prompt, Refusal, Tokenized


class Saying:
    """A backend that says what it was told to say."""

    def __init__(self, *messages: Message) -> None:
        self._messages = messages

    async def answer(self, call: Call) -> AsyncGenerator[Message, None]:
        for message in self._messages:
            yield message

    async def tokenize(self, prompt: Prompt) -> Tokenized | Refusal:
        return Refusal(503, "gone")

    async def detokenize(self, tokens: tuple[int, ...]) -> str | Refusal:
        return Refusal(503, "gone")

    async def is_ready(self) -> bool:
        return False
