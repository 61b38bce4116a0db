"""A sequence in the engine: lengths in an asserted order, the rest are properties.

0          prompt_length     cached     committed           limit
|--- prompt ---|--- answer ---|-- pending --|                  |
"""

from dataclasses import dataclass, field

from torch import Tensor

from mars_ray.decode.request import Completion, FinishReason, Request, TokenEvent


@dataclass(slots=True)
class Sequence:
    """Mutable state of one request; `drafts` wait to be verified by the next forward."""

    request: Request
    window: int
    tokens: list[int]
    cached: int = 0
    forwards: int = 0
    token_forward: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    draft_q_KV: Tensor | None = None

    @property
    def committed(self) -> int:
        """Tokens that are final, prompt included."""
        return len(self.tokens)

    @property
    def limit(self) -> int:
        """Where the answer ends at the latest."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def remaining(self) -> int:
        """Tokens the answer may still get."""
        return self.limit - self.committed

    @property
    def pending(self) -> list[int]:
        """Committed tokens that the cache does not hold yet; at least the last one."""
        return self.tokens[self.cached :]

    def check(self) -> None:
        """Assert the order of the lengths."""
        order = (0, self.cached, self.committed, self.limit)
        assert order == tuple(sorted(order)), f"{self.request.id}: {order} is out of order"
        assert self.cached < self.committed, f"{self.request.id}: nothing to forward"

    def commit(self, tokens: list[int]) -> TokenEvent:
        """Append what this forward committed, up to a stop token or the limit."""
        self.forwards += 1
        kept = tokens[: self.remaining]
        stop = next((i for i, t in enumerate(kept) if t in self.request.stop_ids), None)
        if stop is not None:
            kept = kept[: stop + 1]
        self.tokens += kept
        self.token_forward += [self.forwards] * len(kept)
        completion = None
        if stop is not None or self.remaining == 0:
            completion = self.completion("length" if stop is None else "stop")
        return TokenEvent(self.request.id, tuple(kept), self.forwards, completion)

    def completion(self, reason: FinishReason, error: str | None = None) -> Completion:
        """The result as it stands."""
        return Completion(
            self.request.id,
            tuple(self.tokens[len(self.request.prompt) :]),
            tuple(self.token_forward),
            self.forwards,
            reason,
            error,
        )
