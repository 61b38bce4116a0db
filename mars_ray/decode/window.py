"""How many masks a step of `verified` gets: as many as pay for their rows.

Only for requests at threshold 1, whose output does not depend on it, and for those without a fixed
threshold, whose output depends on the load anyway. Masks cost a row now, and
the drafts they become another one in the next step; what they bring is known from how often the
drafts of each depth were accepted lately. Under load rows cost more, and the window shrinks to
nothing before it would make decoding slower than `exact`.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from mars_ray.config.decode import VerifiedMode
from mars_ray.core.cost import StepCost
from mars_ray.core.drafting import Choice, all_choices, expected
from mars_ray.decode.sequence import Sequence

# A depth's rate before anything was observed, and how many observations that counts for.
_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 4.0
# What an observation still counts for after another one of its depth.
_DECAY = 0.99
# With the window at 0 nothing is learnt: every so many steps one sequence tries a single mask.
_PROBE_EVERY = 128
# Masks must promise so much more than none: less is within what a step's cost is wrong by.
_WORTH = 1.03
# Rates change slowly: what was chosen for a load holds for so many steps.
_KEEP = 32


@dataclass(slots=True)
class AcceptanceRates:
    """How often a draft of each depth is accepted, if those before it are; lately above all."""

    depth: int
    _accepted: list[float] = field(init=False)
    _seen: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._accepted = [_PRIOR_RATE * _PRIOR_WEIGHT] * self.depth
        self._seen = [_PRIOR_WEIGHT] * self.depth

    def observe(self, drafts: int, accepted: int) -> None:
        """One verification: the drafts behind the first rejection tell nothing."""
        for index in range(min(drafts, accepted + 1)):
            self._seen[index] = self._seen[index] * _DECAY + 1
            self._accepted[index] = self._accepted[index] * _DECAY + (index < accepted)

    @property
    def rates(self) -> list[float]:
        """By depth, from the first draft on."""
        return [a / n for a, n in zip(self._accepted, self._seen, strict=True)]


def best_choice(
    sequences: int,
    other_rows: int,
    rates: Several[float],
    cost: StepCost,
    choices: Several[Choice],
) -> Choice:
    """That with the most tokens per second, the rows of others counting as a token each.

    Of equals the first one; and the first of all, which is no masks, unless another is worth it.
    """

    def tokens_per_second(choice: Choice) -> float:
        each = expected(choice, rates)
        tokens = other_rows + sequences * each.tokens
        return tokens / cost.seconds(other_rows + sequences * each.rows)

    none, best = choices[0], max(choices, key=tokens_per_second)
    return best if tokens_per_second(best) > _WORTH * tokens_per_second(none) else none


class WindowControl:
    """Sets the window and the groups of every such sequence before each step."""

    def __init__(self, cost: StepCost, depth: int, most_rows: int) -> None:
        """`most_rows` of one sequence in one step."""
        self.cost = cost
        self._most_rows = most_rows
        # Sampled drafts are accepted less often than greedy ones.
        self.rates = {False: AcceptanceRates(depth), True: AcceptanceRates(depth)}
        self._steps = 0
        self._chosen: dict[tuple[object, ...], Choice] = {}

    def set_windows(self, running: Several[Sequence]) -> None:
        """For the step to come."""
        self._steps += 1
        if self._steps % _KEEP == 0:
            self._chosen.clear()
        others = sum(1 + len(s.drafts) + s.window for s in running if not _is_controlled(s))
        for sampled, members in _by_sampling(running):
            for sequence in members:
                choice = self._choice(sequence, sampled, len(members), others)
                sequence.window, sequence.groups = choice.window, choice.groups
            if self._steps % _PROBE_EVERY == 0 and not members[0].window:
                members[0].window, members[0].groups = 1, 1

    def _choice(self, sequence: Sequence, sampled: bool, members: int, others: int) -> Choice:
        mode = sequence.request.mode
        assert isinstance(mode, VerifiedMode)
        key = (sequence.widest, mode.groups, sampled, members, others)
        choice = self._chosen.get(key)
        if choice is None:
            choices = all_choices(sequence.widest, mode.groups, self._most_rows)
            rates = self.rates[sampled].rates
            choice = best_choice(members, others, rates, self.cost, choices)
            self._chosen[key] = choice
        return choice

    def observe(self, sequence: Sequence, drafts: int, committed: int) -> None:
        """What a step made of a sequence's drafts."""
        if drafts and _is_controlled(sequence):
            self.rates[_is_sampled(sequence)].observe(drafts, committed - 1)


def _by_sampling(running: Several[Sequence]) -> Iterator[tuple[bool, list[Sequence]]]:
    for sampled in (False, True):
        members = [s for s in running if _is_controlled(s) and _is_sampled(s) == sampled]
        if members:
            yield sampled, members


def _is_controlled(sequence: Sequence) -> bool:
    mode = sequence.request.mode
    return isinstance(mode, VerifiedMode) and (
        mode.threshold == 1 or sequence.request.quality is not None
    )


def _is_sampled(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature > 0
