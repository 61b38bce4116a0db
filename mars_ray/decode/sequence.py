"""A sequence in the engine: lengths in an asserted order, the rest are properties.

0          prompt_length     cached     committed           limit
|--- prompt ---|--- answer ---|-- pending --|                  |

And drafts without a model: the tokens that followed where the last ones stood before. Known as
prompt lookup (transformers' `prompt_lookup_num_tokens`) and as `ngram` in vLLM. Here each sequence
has an index, so a step costs no search through its text. How far such a draft is to be believed
depends on how many tokens match, on whether the masks say the same, and on the text: `NgramStats`
counts the first two over all sequences, `NgramIndex` what its own drafts were worth.
"""

from collections import abc
from dataclasses import dataclass, field
from typing import Literal

from mars_ray.core.tree import Choice, chain, first_chain, path_to, renumbered
from mars_ray.decode.request import (
    Completion,
    FinishReason,
    GrammarState,
    Request,
    TokenEvent,
    TokenLogprobs,
)

# A pair of tokens must match at least; of its earlier places so many are compared, latest first.
_LEAST_MATCH, _PLACES = 2, 8
_LONGEST_MATCH = 16  # longer ones count as this long
# Rates before anything is observed, by the length of the match, count for so many observations.
_PRIOR_WEIGHT = 4.0
_MOST_RATE = 0.99
# Weights that an observation keeps after each further one, of all sequences and of its own.
_DECAY, _OWN_DECAY = 0.99, 0.9
_OWN_WEIGHT = 2.0  # expected acceptances that a sequence is taken to have had as expected


@dataclass(frozen=True, slots=True)
class Match:
    """Why a draft was looked up: the number of tokens before it that match, and whether masks
    proposed it too, or only others in its place."""

    length: int
    masks: Literal["silent", "agree", "differ"]


class NgramIndex:
    """Where each pair of a sequence's tokens has stood."""

    __slots__ = ("_accepted", "_earlier", "_expected", "_latest")

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}  # the place behind the pair
        self._earlier = [0] * _LEAST_MATCH  # by place: the one before it behind the same pair
        self._expected = self._accepted = 0.0

    def drafts(self, tokens: abc.Sequence[int], most: int) -> tuple[list[int], int]:
        """At most so many tokens that followed the longest match, and its length; nothing and 0 if
        the last pair is new. Call it with the same tokens and more."""
        latest, earlier = self._latest, self._earlier
        for place in range(len(earlier), len(tokens)):
            pair = tokens[place - 2], tokens[place - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = place
        if len(tokens) < _LEAST_MATCH:
            return [], 0
        found, length = 0, 0
        place = latest.get((tokens[-2], tokens[-1]), 0)
        for _ in range(_PLACES):
            if not place or length == _LONGEST_MATCH:
                break
            own = _match(tokens, place)
            if own > length:
                found, length = place, own
            place = earlier[place]
        drafts: list[int] = list(tokens[found : found + most]) if found else []
        while drafts and len(drafts) < most:
            drafts.append(drafts[len(drafts) - (len(tokens) - found)])  # the text goes in a circle
        return drafts, length

    @property
    def trust(self) -> float:
        """How often this sequence's drafts were accepted, over how often all sequences' are."""
        return (self._accepted + _OWN_WEIGHT) / (self._expected + _OWN_WEIGHT)

    def observe(self, rate: float, *, accepted: bool) -> None:
        """Learn from a draft that was checked; `rate` is what all sequences expected."""
        self._expected = self._expected * _OWN_DECAY + rate
        self._accepted = self._accepted * _OWN_DECAY + accepted


def _match(tokens: abc.Sequence[int], place: int) -> int:
    """How many tokens before the place are those at the end, its pair known to be."""
    length = _LEAST_MATCH
    most = min(_LONGEST_MATCH, place)
    while length < most and tokens[place - length - 1] == tokens[-length - 1]:
        length += 1
    return length


class NgramStats:
    """How often looked-up drafts were accepted lately."""

    def __init__(self) -> None:
        lengths = range(_LONGEST_MATCH + 1)
        prior = {
            "silent": [length / (length + 3) for length in lengths],
            "agree": [length / (length + 1) for length in lengths],
            "differ": [length / (length + 12) for length in lengths],
        }
        self._accepted = {key: [_PRIOR_WEIGHT * p for p in rates] for key, rates in prior.items()}
        self._checked = {key: [_PRIOR_WEIGHT for _ in lengths] for key in prior}

    def of(self, match: Match) -> float:
        """How likely such a draft is accepted if its parent is, over all sequences."""
        place = min(match.length, _LONGEST_MATCH)
        return self._accepted[match.masks][place] / self._checked[match.masks][place]

    def likely(self, match: Match, index: NgramIndex) -> float:
        """How likely such a draft of the index's sequence is accepted."""
        return min(_MOST_RATE, self.of(match) * index.trust)

    def observe(
        self,
        matches: abc.Sequence[Match | None],
        outcome: int,
        parents: abc.Sequence[int],
        index: NgramIndex,
    ) -> None:
        """Learn from a verification of a sequence's drafts that ended at a node (`core.tree`)."""
        reached = {0, *path_to(parents, outcome)}
        for node, (parent, match) in enumerate(zip(parents, matches, strict=True), start=1):
            if match and parent in reached:
                accepted = node in reached
                index.observe(self.of(match), accepted=accepted)
                place = min(match.length, _LONGEST_MATCH)
                counts = self._checked[match.masks], self._accepted[match.masks]
                for count, one in zip(counts, (1, accepted), strict=True):
                    count[place] = count[place] * _DECAY + one


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

    def drafted_by(self, adapter: str | None) -> None:
        """Note which adapter's drafts or masks a forward had."""
        if adapter and adapter not in self.adapters[-1:]:
            self.adapters.append(adapter)

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
            self.follow_grammar()
        return self.event(tuple(kept), completion)

    def event(self, tokens: tuple[int, ...], completion: Completion | None) -> TokenEvent:
        return TokenEvent(
            self.request.id,
            tokens,
            self.forwards,
            completion,
            disagreed=self.disagreed,
            queue_s=self.queue_s,
            cached_tokens=self.found or 0,
            threshold=self.lowest_threshold,
            adapter=self.adapter,
        )

    def follow_grammar(self) -> None:
        """Drop drafts that the grammar forbids; if only one text can follow, draft its tokens."""
        if not self.grammar or not self.request.mode.has_drafts:
            return
        count = self.grammar.admissible(self.drafts)
        forced = self.grammar.forced()[: max(len(self.drafts), self.widest)]
        if len(forced) >= count:
            self.set_drafts(forced, [1.0] * len(forced))
        else:
            self.set_drafts(self.drafts[:count], self.draft_probabilities[:count])

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            self.request.id,
            tuple(self.tokens[len(self.request.prompt) :]),
            tuple(self.token_forward),
            self.forwards,
            reason,
            tuple(self.adapters),
        )
