"""One request in vLLM's engine: makes events of what its steps say about it."""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import time
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from mars_ray.core.thresholds import Elastic
from mars_ray.decode.engine_thread import Deliver
from mars_ray.decode.request import Completion, Request, TokenEvent, TokenLogprobs
from mars_ray.decode.request import FinishReason as Reason
from mars_ray.errors import PoisonError

_REASONS: dict[FinishReason, Reason] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class VllmAnswer:
    """The state of one request from its submission to its end."""

    request: Request
    deliver: Deliver
    core_id: str  # its name in vLLM's engine
    threshold: float | None  # the lowest in force so far, in modes that have one
    in_force: float | None = field(init=False)  # the threshold of the next step
    submitted_s: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    cached_tokens: int | None = None  # of the prompt; None until it has been computed
    forwards: int = 0
    tokens: list[int] = field(default_factory=list)
    token_forward: list[int] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)  # whose drafts were verified, in order
    drafted_by: str | None = None  # the adapter that made drafts for the next step
    is_over: bool = False

    def __post_init__(self) -> None:
        self.in_force = self.threshold

    def follow(self, set_point: float) -> None:
        """Sets the threshold from the next step on, if the request tolerates a change."""
        if self.in_force is not None and isinstance(self.request.quality, Elastic):
            self.in_force = max(self.request.quality.floor, set_point)

    def add(self, output: EngineCoreOutput, adapter: str | None) -> TokenEvent:
        """The event of a step in which this adapter, or none, has made drafts for the next one."""
        for event in output.events or ():
            if event.type == EngineCoreEventType.SCHEDULED and self.queue_s is None:
                self.queue_s = max(0.0, event.timestamp - self.submitted_s)
        if output.prefill_stats and self.cached_tokens is None:
            self.cached_tokens = output.prefill_stats.num_cached_tokens
        tokens, verified = tuple(output.new_token_ids), None
        if tokens:
            verified = self._step(tokens, adapter)
        completion = failure = None
        if output.finish_reason is not None:
            self.is_over = True
            reason = _REASONS.get(output.finish_reason)
            if reason:
                completion = self._completion(reason)
            else:
                failure = PoisonError(f"vLLM ended this request with {output.finish_reason}")
        logprobs = output.new_logprobs if self.request.logprobs is not None else None
        return self._event(
            tokens,
            completion,
            logprobs=_logprobs(logprobs, self.request.logprobs or 0) if logprobs else (),
            adapter=verified,
            failure=failure,
        )

    def _step(self, tokens: tuple[int, ...], adapter: str | None) -> str | None:
        """Counts a forward; returns the adapter whose drafts it has verified."""
        self.forwards += 1
        self.tokens += tokens
        self.token_forward += [self.forwards] * len(tokens)
        if self.threshold is not None and self.in_force is not None:
            self.threshold = min(self.threshold, self.in_force)
        # A prompt's forward has no masks.
        verified, self.drafted_by = self.drafted_by, adapter if self.forwards > 1 else None
        if verified and verified not in self.adapters[-1:]:
            self.adapters.append(verified)
        return verified

    def late(self) -> TokenEvent:
        """The last event of a request whose deadline has passed, with the tokens that it has."""
        self.is_over = True
        return self._event((), self._completion("deadline"))

    def _event(
        self,
        tokens: tuple[int, ...],
        completion: Completion | None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        adapter: str | None = None,
        failure: Exception | None = None,
    ) -> TokenEvent:
        return TokenEvent(
            self.request.id,
            tokens,
            self.forwards,
            completion,
            logprobs=logprobs,
            queue_s=self.queue_s or 0.0,
            cached_tokens=self.cached_tokens or 0,
            threshold=self.threshold,
            adapter=adapter,
            failure=failure,
        )

    def _completion(self, reason: Reason) -> Completion:
        return Completion(
            self.request.id,
            tuple(self.tokens),
            tuple(self.token_forward),
            self.forwards,
            reason,
            tuple(self.adapters),
        )


def _logprobs(lists: LogprobsLists, top: int) -> tuple[TokenLogprobs, ...]:
    """Of each token; vLLM puts the token itself before the likeliest ones."""
    return tuple(
        TokenLogprobs(values[0], tuple(zip(tokens[1 : 1 + top], values[1 : 1 + top], strict=True)))
        for tokens, values in zip(
            lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True
        )
    )
