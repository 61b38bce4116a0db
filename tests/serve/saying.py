"""A backend that says what it was told to say."""

from collections.abc import AsyncGenerator

from mars_ray.serve.protocol import (
    ErrorInfo,
    GenerationRequest,
    Message,
    Tokenized,
    TokenizeRequest,
)


class Saying:
    """A backend that says what it was told to say."""

    def __init__(self, *messages: Message) -> None:
        self._messages = messages

    async def generate(self, call: GenerationRequest) -> AsyncGenerator[Message, None]:
        for message in self._messages:
            yield message

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        return ErrorInfo(503, "gone")

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        return ErrorInfo(503, "gone")

    async def used(self, call_id: str) -> None:
        return None

    async def is_ready(self) -> bool:
        return False
