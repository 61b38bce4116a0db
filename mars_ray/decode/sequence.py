"""A sequence in the engine: lengths in an asserted order, the rest are properties.

0          prompt_length     cached     committed           limit
|--- prompt ---|--- answer ---|-- pending --|                  |
"""

from collections import abc
from dataclasses import dataclass, field

from mars_ray.core.tree import Choice, chain, first_chain, renumbered
from mars_ray.decode.ngram import Match, NgramIndex
from mars_ray.decode.request import (
    Completion,
    FinishReason,
    GrammarState,
    Request,
    TokenEvent,
    TokenLogprobs,
)


@dataclass(slots=True)
class Sequence:
    """Mutable state of one request; `drafts` wait to be verified by the next forward."""

    request: Request
    widest: int  # most masks of a group
    tokens: list[int]
    cached: int = 0
    found: int | None = None  # how many of these the prefix cache had at first admission
    groups: int = field(init=False)  # outcomes that get masks, unless window control chooses
    branches: int = field(init=False)  # alternatives for the first of the next drafts
    choice: Choice | None = None  # window control's choice for the next step
    forwards: int = 0
    last_commit: int = 0  # tokens that the last forward committed
    token_forward: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    draft_probabilities: list[float] = field(default_factory=list)  # 0 if no mask proposed it
    draft_parents: list[int] = field(default_factory=list)  # the drafts as a tree (`core.tree`)
    draft_matches: list[Match | None] = field(default_factory=list)  # of drafts looked up
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    threshold: float = field(init=False)  # in force in the next step, in modes that have one
    lowest_threshold: float | None = field(init=False)  # lowest of all steps so far
    grammar: GrammarState | None = field(init=False)
    adapters: list[str] = field(
        default_factory=list
    )  # that have made its drafts, one after another
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the first full pages of its tokens
    published: int = 0  # number of its first pages that are published
    adapter: str | None = None  # the one that made the waiting drafts
    # Of the prompt's tokens from the second on, as far as their rows were forwarded.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    disagreed: int = 0  # tokens seen not to be the model's own choice
    ngram_tokens: int = 0  # accepted drafts that the n-gram lookup proposed
    submitted_s: float = 0.0
    queue_s: float = 0.0  # from submission to its first rows
    arrival: int = 0
    served: int = 0  # the last step that had rows of it

    def __post_init__(self) -> None:
        mode = self.request.mode
        self._set_size()
        own = mode.own_threshold
        # With a quality the mode's own threshold never applies; the engine sets another one.
        self.threshold = 1.0 if own is None or self.request.quality else own
        self.lowest_threshold = None if own is None else self.threshold
        self.grammar = self.request.grammar.start() if self.request.grammar else None

    def _set_size(self) -> None:
        self.groups = self.request.mode.groups_of(self.widest)
        # A grammar can follow only one text, so it allows no branches.
        self.branches = 1 if self.request.grammar else self.request.mode.branches_of(self.widest)

    @property
    def order(self) -> tuple[int, int]:
        """The order in which sequences are served when there is not enough for all."""
        return self.request.priority, self.arrival

    @property
    def committed(self) -> int:
        """Tokens that are final, prompt included."""
        return len(self.tokens)

    @property
    def limit(self) -> int:
        """The length at which the answer ends at the latest."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def remaining(self) -> int:
        """Tokens the answer may still get."""
        return self.limit - self.committed

    @property
    def pending(self) -> list[int]:
        """Committed tokens that the cache does not hold yet; at least the last one."""
        return self.tokens[self.cached :]

    @property
    def is_plain(self) -> bool:
        """Whether the next step is one of plain decoding, by the threshold in force."""
        return self.request.mode.is_plain_at(self.threshold)

    @property
    def window(self) -> int:
        """Masks of the next step's largest group."""
        if self.is_plain:
            return 0
        return self.widest if self.choice is None else max(self.choice.masks, default=0)

    @property
    def masks(self) -> int:
        """Masks of all groups of the next step, at most."""
        if self.is_plain:
            return 0
        return self.widest * self.groups if self.choice is None else sum(self.choice.masks)

    def check(self) -> None:
        """Assert the order of the lengths."""
        order = (0, self.cached, self.committed, self.limit)
        assert order == tuple(sorted(order)), f"{self.request.id}: {order} is out of order"
        assert self.cached < self.committed, f"{self.request.id}: nothing to forward"

    def refit(self, depth: int, rows: int) -> None:
        """Adapt to masks of at most this depth and to forwards of at most `rows`."""
        mode = self.request.mode
        widest = mode.widest(depth)
        self.widest, self.choice = widest, None
        self._set_size()
        if widest and (excess := mode.most_rows(widest) - rows) > 0:
            self.groups = max(1, self.groups - -(-excess // widest))
            self.branches = 1
        if mode.verifies:
            self.keep_drafts(range(1, min(widest, first_chain(self.draft_parents)) + 1))

    def set_drafts(
        self,
        tokens: list[int],
        probabilities: list[float],
        parents: list[int] | None = None,
        matches: list[Match | None] | None = None,
    ) -> None:
        """Set what the next step has to verify: a chain, unless parents are given."""
        self.drafts, self.draft_probabilities = tokens, probabilities
        self.draft_parents = chain(len(tokens)) if parents is None else parents
        self.draft_matches = [None] * len(tokens) if matches is None else matches

    def keep_drafts(self, nodes: abc.Sequence[int]) -> None:
        """Keep only these drafts, given in increasing order, each along with its parent."""
        self.set_drafts(
            [self.drafts[node - 1] for node in nodes],
            [self.draft_probabilities[node - 1] for node in nodes],
            renumbered(self.draft_parents, nodes),
            [self.draft_matches[node - 1] for node in nodes],
        )

    def kept(self, tokens: list[int]) -> list[int]:
        """The tokens of a forward that are committed: those up to a stop token, the limit, or a
        token that the grammar forbids."""
        kept = tokens[: self.remaining]
        stop = next((i for i, t in enumerate(kept) if t in self.request.stop_ids), len(kept))
        kept = kept[: stop + 1]
        return kept[: self.grammar.admissible(kept)] if self.grammar else kept

    def commit(self, kept: list[int]) -> TokenEvent:
        """Append what this forward committed."""
        assert kept, f"{self.request.id}: a forward without a token"
        self.forwards += 1
        self.tokens += kept
        self.last_commit = len(kept)
        self.token_forward += [self.forwards] * len(kept)
        completion = None
        stopped = kept[-1] in self.request.stop_ids
        if stopped or self.remaining == 0:
            completion = self.completion("stop" if stopped else "length")
        elif self.grammar:
            self.grammar.consume(kept)
            if self.request.mode.has_drafts:
                # Drop drafts that it forbids; if only one text can follow, draft its tokens.
                count = self.grammar.admissible(self.drafts)
                forced = self.grammar.forced()[: max(len(self.drafts), self.widest)]
                if len(forced) >= count:
                    self.set_drafts(forced, [1.0] * len(forced))
                else:
                    self.set_drafts(self.drafts[:count], self.draft_probabilities[:count])
        return self.event(tuple(kept), completion)

    def event(self, tokens: tuple[int, ...], completion: Completion | None) -> TokenEvent:
        return TokenEvent(
            self.request.id,
            tokens,
            self.forwards,
            completion,
            disagreed=self.disagreed,
            ngram_tokens=self.ngram_tokens,
            queue_s=self.queue_s,
            cached_tokens=self.found or 0,
            threshold=self.lowest_threshold,
            adapter=self.adapter,
        )

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            self.request.id,
            tuple(self.tokens[len(self.request.prompt) :]),
            tuple(self.token_forward),
            self.forwards,
            reason,
            tuple(self.adapters),
        )
