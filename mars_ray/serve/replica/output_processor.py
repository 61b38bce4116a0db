"""One answer in the making: from an engine's events to pieces of text."""

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace

from mars_ray.config.decode import ExactMode, JacobiMode
from mars_ray.decode.request import FinishReason, Request, TokenEvent, as_one
from mars_ray.errors import DeadlineError
from mars_ray.serve.protocol import (
    Finish,
    GenerationRequest,
    OutputDelta,
    Served,
    TokenText,
    ToolCallDelta,
    joined,
)
from mars_ray.serve.replica.text import Decode, Writer
from mars_ray.serve.replica.tool_parser import ToolCallReader

TokenTextOf = Callable[[int, float], TokenText]


class OutputProcessor:
    """Add events until a piece has a finish."""

    def __init__(
        self,
        call: GenerationRequest,
        request: Request,
        choice: int,
        decode: Decode,
        token_text: TokenTextOf,
    ) -> None:
        self._call = call
        self._request = request
        self._choice = choice
        self._token_text = token_text
        self._writer = Writer(decode, call.stop, request.sampling.min_new_tokens)
        self._reader = ToolCallReader(request.id) if call.tools else None
        self._tokens = 0
        self._forwards = 0
        self._served: list[Served] = []
        # The other modes have no masks, whatever adapter is in force.
        self._is_drafted = not isinstance(request.mode, ExactMode | JacobiMode)

    def add(self, events: Several[TokenEvent]) -> tuple[OutputDelta, TokenEvent]:
        """What some steps add to the text, and those of them that count as one.

        Raises DeadlineError if the answer's time was over.
        """
        # Only at a stop string the text may end between two steps, and only at another adapter the
        # counts go elsewhere.
        is_apart = self._call.stop or len({event.adapter for event in events}) > 1
        units = events if is_apart else [as_one(events)]
        piece, used = self._added(units[0]), 1
        while used < len(units) and not piece.finish:
            piece, used = joined(piece, self._added(units[used])), used + 1
        return piece, as_one(units[:used])

    def _added(self, event: TokenEvent) -> OutputDelta:
        # Only the last token can be a stop token; it ends the text and is not part of it.
        shown = [token for token in event.tokens if token not in self._request.stop_ids]
        written = self._writer.push(shown)
        text, stopped = written.text, written.stopped
        self._count(event, written.tokens if stopped else len(event.tokens))
        reason: FinishReason | None = "stop" if stopped else None
        if event.completion is not None and not stopped:
            rest = self._writer.flush()
            text += rest.text
            reason = "stop" if rest.stopped else event.completion.finish_reason
        calls: tuple[ToolCallDelta, ...] = ()
        if self._reader:
            text, calls = self._reader.push(text)
            text += self._reader.flush() if reason else ""
        piece = OutputDelta(
            text,
            choice=self._choice,
            forward=event.forward,
            tokens=written.tokens,
            logprobs=self._logprobs(event, written.tokens),
            calls=calls,
        )
        return replace(piece, finish=self._finish(reason, event)) if reason else piece

    def _count(self, event: TokenEvent, tokens: int) -> None:
        """What the answer has so far, and under which adapter it got it."""
        forwards = event.forward - self._forwards
        self._tokens, self._forwards = self._tokens + tokens, event.forward
        adapter = event.adapter if self._is_drafted else None
        if self._served and self._served[-1].adapter == adapter:
            last = self._served.pop()
            tokens, forwards = last.tokens + tokens, last.forwards + forwards
        self._served.append(Served(adapter, tokens, forwards))

    def _finish(self, reason: FinishReason, event: TokenEvent) -> Finish:
        if reason == "deadline":
            limit_s = self._call.timeout_s
            raise DeadlineError(f"the answer was not finished within {limit_s:g} s")
        # A stop string may end the text within a call, which nobody can make then.
        reader = self._reader
        has_called = reader is not None and reader.count > 0 and not reader.is_cut
        calls = reason == "stop" and has_called and not self._call.is_forced
        return Finish(
            "tool_calls" if calls else reason,
            len(self._request.prompt),
            self._tokens,
            event.forward,
            event.disagreed,
            event.threshold,
            None if self._request.mode == self._call.mode else self._request.mode.type,
            tuple(self._served),
        )

    def _logprobs(self, event: TokenEvent, count: int) -> tuple[TokenText, ...]:
        """Of the first tokens of an event, if the request asked for any."""
        return tuple(
            replace(
                self._token_text(token, entry.logprob),
                top=tuple(self._token_text(other, logprob) for other, logprob in entry.top),
            )
            for token, entry in zip(event.tokens[:count], event.logprobs, strict=False)
        )
