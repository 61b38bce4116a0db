"""A replica's work without Ray: from a checked call to the pieces of its answer."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from transformers import PreTrainedTokenizerBase

from mars_ray.config.serve import ServeJob
from mars_ray.data.chat import Message as ChatTurn
from mars_ray.data.chat import encode_prompt
from mars_ray.decode.engine import Engine
from mars_ray.decode.request import Request
from mars_ray.decode.thread import EngineThread
from mars_ray.errors import DataError, EngineError, PromptTooLongError, RequestError
from mars_ray.model.stop import stop_ids
from mars_ray.serve.messages import ChatCall, Finish, Message, Piece, Refusal
from mars_ray.serve.stream import internal_error
from mars_ray.serve.text import Writer

logger = logging.getLogger(__name__)

# A step may prefill a full batch of long prompts, which takes a large model on CPUs this long.
_STALLED_S = 60.0
_RETRY_AFTER_S = 1


class ChatEngine:
    """One engine and its tokenizer, answering chat calls. `start` it before use."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, job: ServeJob) -> None:
        """Raises ModelError if the model does not say how an answer ends."""
        self._config = engine.config
        self._thread = EngineThread(engine)
        self._tokenizer = tokenizer
        self._limits = job.limits
        self._stop_ids = stop_ids(engine.model)
        self._open = 0

    def start(self) -> None:
        """Let the engine's thread begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine's thread."""
        self._thread.stop()

    def check_health(self) -> None:
        """Raises EngineError if the engine is dead or stuck."""
        self._thread.check_health(_STALLED_S)

    @property
    def open_calls(self) -> int:
        """Calls being answered or waiting."""
        return self._open

    async def answer(self, call: ChatCall) -> AsyncGenerator[Message, None]:
        """The pieces of the answer, one per engine step, or a refusal.

        Closing the generator frees the call's place in the engine.
        """
        if self._open >= self._config.max_batch + self._limits.waiting_requests:
            message = f"{self._open} requests are running or waiting; try again later"
            yield Refusal(429, message, code="too_many_requests", retry_after_s=_RETRY_AFTER_S)
            return
        self._open += 1
        try:
            async with aclosing(self._pieces(call, self._request(call))) as pieces:
                async for piece in pieces:
                    yield piece
        except PromptTooLongError as error:
            yield Refusal(400, str(error), param="messages", code="context_length_exceeded")
        except RequestError as error:
            yield Refusal(400, str(error), param=error.field, code="invalid_value")
        except DataError as error:
            yield Refusal(400, str(error), param="messages", code="invalid_value")
        except EngineError as error:
            yield Refusal(503, str(error), code="engine_error", retry_after_s=_RETRY_AFTER_S)
        except Exception:
            logger.exception("request %s failed", call.id)
            yield internal_error(call.id)
        finally:
            self._open -= 1

    def _request(self, call: ChatCall) -> Request:
        turns = [ChatTurn(turn.role, turn.content) for turn in call.messages]
        prompt = tuple(encode_prompt(turns, self._tokenizer))
        # At least one, so that a prompt without room is refused, and by the engine.
        room = max(1, self._config.max_context - len(prompt))
        return Request(
            id=call.id,
            prompt=prompt,
            mode=call.mode,
            sampling=call.sampling,
            max_new_tokens=call.max_new_tokens or min(room, self._limits.new_tokens),
            stop_ids=self._stop_ids,
        )

    async def _pieces(self, call: ChatCall, request: Request) -> AsyncGenerator[Piece, None]:
        writer = Writer(self._decode, call.stop)
        tokens = 0
        stream = self._thread.stream(request)
        async with aclosing(stream) as events:
            async for event in events:
                # Only the last token can be a stop token; it ends the text and is not part of it.
                shown = [token for token in event.tokens if token not in self._stop_ids]
                written = writer.push(shown)
                text, stopped = written.text, written.stopped
                tokens += written.tokens if stopped else len(event.tokens)
                reason = "stop" if stopped else None
                if event.completion is not None and not stopped:
                    rest = writer.flush()
                    text += rest.text
                    reason = "stop" if rest.stopped else event.completion.finish_reason
                if reason is None:
                    yield Piece(text)
                    continue
                assert reason in ("stop", "length"), reason
                yield Piece(text, Finish(reason, len(request.prompt), tokens, event.forward))
                return

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
