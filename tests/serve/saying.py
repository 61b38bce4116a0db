"""A model that says what it was told to say."""

from collections.abc import AsyncGenerator

from serve.written import envelopes

from mars_ray.serve.protocol import (
    ErrorInfo,
    GenerationRequest,
    Message,
    OutputDelta,
    Tokenized,
    TokenizeRequest,
)


class Saying:
    """A model that says what it was told to say."""

    def __init__(self, *messages: OutputDelta | ErrorInfo) -> None:
        self._messages = messages

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Message, None]:
        for message in envelopes(request, self._messages):
            yield message

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        return ErrorInfo(503, "gone")

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        return ErrorInfo(503, "gone")

    async def used(self, request_id: str) -> None:
        return None

    async def is_ready(self) -> bool:
        return False
