"""Which drafts and masks the sequences of a step get: those that are worth the cost of their rows.

This applies only to `verified` at threshold 1, whose output does not depend on it, and to requests
without a fixed threshold, whose output depends on the load anyway. Of these, those in `confidence`
have all their masks or none, by what steps with masks committed lately.

A mask costs a row now, and the draft that it becomes costs another row in the next step. The value
of a draft is estimated from its confidence and from how often drafts of such confidence were
accepted lately. The value of a mask is estimated from the drafts that masks of its depth became.
Under load rows cost more and fewer are worth their cost, until decoding is the same as `exact`.

`DraftStats` counts how likely drafts are accepted, and what masks are worth: a draft is judged by
its confidence, a mask by the drafts that masks of its depth became.
"""

import math
from bisect import bisect_right
from collections import abc
from itertools import accumulate, pairwise

import numpy as np

from mars_ray.config.modes import (
    MOST_DRAFTS,
    MOST_NGRAM_DRAFTS,
    ConfidenceMode,
    VerifiedMode,
    controlled_branches,
)
from mars_ray.core.step_cost import StepCost
from mars_ray.core.tree import (
    Choice,
    Prospects,
    best_choice,
    children_of,
    depths_of,
    first_chain,
    path_to,
    reaches_of,
)
from mars_ray.decode.ngram import Match, NgramStats
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies import Plan

# Weight that a step's speed-up keeps after each further step.
_STEP_DECAY = 0.95
# A row's least price in tokens: even where rows look free, less is within the error of the costs.
_LEAST_PRICE = 0.03
# Factor by which the price is raised, repeatedly, while a step would have too many rows.
_DEARER = 1.5
# How fast the price follows the load.
_PRICE_RATE = 0.2
# Sequences whose new drafts are examined in a step: more of the same would only take time.
_LOOKED_AT = 4
# Masks that are never tried teach nothing, so once in this many steps one sequence has all masks.
_PROBE_EVERY = 128
# In `confidence` as many steps of a sequence have masks after each change of the threshold, before
# it is known what they bring.
_LEAST_TRIES = 16
_NOTHING = Choice(0, (0,))
# Drafts between two of these confidences are counted together.
_CONFIDENCES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_MIDDLES = np.array([(low + high) / 2 for low, high in pairwise((0.0, *_CONFIDENCES, 1.0))])
# A depth's rate before anything is observed, and the number of observations it counts for.
_PRIOR_RATE, _PRIOR_WEIGHT = 0.9, 4.0
# Weight that an observation keeps after each further one.
_COUNT_DECAY = 0.99


class DraftStats:
    """Statistics of greedy drafts, or of sampled ones."""

    def __init__(self, depth: int) -> None:
        self._accepted = (_MIDDLES * _PRIOR_WEIGHT).tolist()
        self._checked = [_PRIOR_WEIGHT] * len(_MIDDLES)
        # By depth, counts of drafts by their probability of being reached and accepted; a mask
        # makes a draft in every branch.
        self._made = np.zeros((depth, len(_MIDDLES)))
        self._steps = np.full((depth, 1), _PRIOR_WEIGHT)  # steps with drafts of that depth
        for index in range(depth):
            place = bisect_right(_CONFIDENCES, _PRIOR_RATE ** (index + 1))
            self._made[index, place] = _PRIOR_WEIGHT
        # The gain of masks in a sequence with drafts, as a share of that in one without.
        self.lasting = 1.0

    def observe(
        self,
        confidences: abc.Sequence[float],
        outcome: int,
        parents: abc.Sequence[int],
    ) -> None:
        """Learn from a verification that ended at a node. Drafts behind rejected ones tell nothing,
        nor those of confidence 0, which no mask proposed."""
        reached = {0, *path_to(parents, outcome)}
        for node, (parent, confidence) in enumerate(zip(parents, confidences, strict=True), 1):
            if confidence and parent in reached:
                place = bisect_right(_CONFIDENCES, confidence)
                self._checked[place] = self._checked[place] * _COUNT_DECAY + 1
                self._accepted[place] = self._accepted[place] * _COUNT_DECAY + (node in reached)

    def of(self, confidences: abc.Sequence[float]) -> list[float]:
        """How likely each of these drafts is accepted if its parent is."""
        places = [bisect_right(_CONFIDENCES, confidence) for confidence in confidences]
        return [self._accepted[place] / self._checked[place] for place in places]

    def observe_drafts(
        self,
        accept: abc.Sequence[float],
        choice: Choice,
        prospects: Prospects,
        parents: abc.Sequence[int],
        matches: abc.Sequence[Match | None],
    ) -> None:
        """Learn from a sequence's new drafts: from how likely each is accepted, and from the choice
        made of them. Masks have not brought what was looked up, or would have been: it has a
        match."""
        survivals, depths = reaches_of(parents, accept)[1:], depths_of(parents)[1:]
        alone = sum(max(0.0, survival - prospects.price) for survival in survivals)
        if prospects.gain > 0:
            lasting = (choice.value - alone) / prospects.gain
            self.lasting += (1 - _COUNT_DECAY) * (lasting - self.lasting)
        made = [
            (depth, survival)
            for depth, survival, match in zip(depths, survivals, matches, strict=True)
            if not match
        ]
        seen = min(max(depths, default=0), len(self._made))
        self._made[:seen] *= _COUNT_DECAY
        self._steps[:seen] = self._steps[:seen] * _COUNT_DECAY + 1
        for depth, survival in made:
            if depth <= seen:
                self._made[depth - 1, bisect_right(_CONFIDENCES, survival)] += 1

    def worth(self, price: float) -> list[float]:
        """Tokens, by depth, that a mask gains in the next step if its outcome occurs, less the
        price of checking its drafts; only a draft that is worth its row is checked."""
        beyond = self._made @ np.maximum(_MIDDLES - price, 0) / self._steps[:, 0]
        return list(accumulate(beyond.tolist(), min))


class DraftControl:
    """Chooses the drafts and masks of every such sequence (`_is_controlled`) before each step."""

    def __init__(
        self, cost: StepCost, depth: int, most_rows: int, own_rows: int | None = None
    ) -> None:
        """`most_rows` is the most rows of a step, `own_rows` of a sequence, by default as many."""
        self.cost = cost
        self.most_rows = most_rows
        self._own_rows = most_rows if own_rows is None else own_rows
        # Sampled drafts are accepted less often than greedy ones.
        self.forget(depth)
        self.ngrams = {False: NgramStats(), True: NgramStats()}
        # Of the last steps, over those of steps without drafts and masks at the same load: sums in
        # which later ones weigh more.
        self._tokens, self._spent = 1.0, 1.0
        # The current step's tokens, those of one without drafts and masks, and their ratio of
        # seconds.
        self._committed, self._least, self._ratio = 0, 0, 1.0
        self._sequences, self._context_tokens = 1, 0
        self._price: float | None = None
        self._steps = 0
        # Of steps with masks in `confidence`, sums in which later ones weigh more; the threshold.
        self._unseen, self._unseen_steps, self._unseen_at = 0.0, 0.0, 1.0

    def forget(self, depth: int) -> None:
        """Forget all statistics of drafts, because another source makes them, to this depth."""
        self.acceptance = {False: DraftStats(depth), True: DraftStats(depth)}

    def choose(self, running: abc.Sequence[Sequence]) -> None:
        """Choose for the next step, which has these sequences."""
        self._steps += 1
        self._sequences = len(running)
        self._context_tokens = sum(sequence.cached for sequence in running)
        if self._least:
            self._tokens = self._tokens * _STEP_DECAY + self._committed / self._least
            self._spent = self._spent * _STEP_DECAY + self._ratio
        speed_up = max(1.0, self._tokens / self._spent)
        self._choose_confidence(running)
        members = [s for s in running if _is_controlled(s)]
        others = sum(1 + len(s.drafts) + s.window for s in running if not _is_controlled(s))
        # Each row of other sequences counts as a token.
        self._committed, self._least, self._ratio = others, others + len(members), 1.0
        least = max(1, self._least)
        if not members:
            return
        if self._price is None:
            self._price = self._price_at(least, least, speed_up)
        for sequence in members:
            _look_up(sequence)
            _leave_out_useless(sequence)
            mode = sequence.request.mode
            assert isinstance(mode, VerifiedMode)
            most = 1  # alternatives for the next first draft: a grammar allows no others
            if not sequence.grammar:
                most = min(mode.branches or 8, controlled_branches(sequence.widest))
            # Those that may be worth a row: the last of n tokens has at most probability 1 / n.
            sequence.branches = max(1, min(most, math.ceil(1 / self._price) - 1))
        accept = [self._accept(sequence) for sequence in members]
        tokens_per_s = speed_up * least / self._seconds(least)
        mask_price = tokens_per_s * self.cost.mask_s
        price, prospects = self._price, self._prospects(members, self._price, mask_price)
        rows = least + _choose_at(prospects, members, accept)
        while rows > least and not self._fits(least, _choices(members)):
            # All must fit, or some would wait for another step.
            price *= _DEARER
            prospects = self._prospects(members, price, mask_price)
            rows = least + _choose_at(prospects, members, accept)
        if not any(s.window for s in running if not _is_controlled(s)):
            first_price = tokens_per_s * self.cost.first_mask_s
            rows = self._without_masks_that_do_not_pay(
                least, prospects, members, accept, first_price
            )
        self._look_at_some(members, accept, prospects)
        if self._steps % _PROBE_EVERY == 0:
            _probe(members[0], min(self.most_rows, self._own_rows))
        masks = sum(sum(sequence.choice.masks) for sequence in members if sequence.choice)
        self._ratio = self._seconds(rows, masks) / self._seconds(least)
        self._price += _PRICE_RATE * (self._price_at(rows, least, speed_up) - self._price)

    def _choose_confidence(self, running: abc.Sequence[Sequence]) -> None:
        """Let the sequences in `confidence` that have no fixed threshold be without masks in this
        step, unless a step with masks yields more tokens a second, or it is time to try."""
        members = [sequence for sequence in running if _follows_in_confidence(sequence)]
        for sequence in members:
            sequence.choice = None
        masks = sum(sequence.window for sequence in members)
        if not masks:
            return
        lowest = min(sequence.threshold for sequence in members)
        if lowest != self._unseen_at:
            self._unseen, self._unseen_steps, self._unseen_at = 0.0, 0.0, lowest
        if self._unseen_steps < _LEAST_TRIES or self._steps % _PROBE_EVERY == 0:
            return
        rows = len(running) + sum(len(sequence.drafts) for sequence in running)
        # Tokens that are committed unseen have their rows in the next step.
        unseen = (self._unseen / self._unseen_steps - 1) * len(members)
        seconds = self._seconds(rows + unseen + masks, masks)
        if 1 + unseen / len(running) < seconds / self._seconds(rows):
            for sequence in members:
                sequence.choice = _NOTHING

    def _fits(self, least: int, choices: abc.Sequence[Choice]) -> bool:
        rows = [choice.rows for choice in choices]
        return least + sum(rows) <= self.most_rows and max(rows) < self._own_rows

    def _price_at(self, rows: int, least: int, speed_up: float) -> float:
        """Tokens that the time of one more row would yield elsewhere."""
        row_s = (self.cost.seconds(1.5 * rows) - self.cost.seconds(0.5 * rows)) / rows
        return max(_LEAST_PRICE, speed_up * least / self._seconds(least) * row_s)

    def _seconds(self, rows: float, masks: int = 0) -> float:
        """Seconds of a step of all running sequences with this number of rows, masks included.

        Work besides the forward is left out. Part of it grows with the rows too, and the price is
        the same within a tenth with or without it.
        """
        return self.cost.seconds(rows, self._sequences, self._context_tokens, masks=masks)

    def _prospects(
        self, members: abc.Sequence[Sequence], price: float, mask_price: float
    ) -> dict[bool, Prospects]:
        """Prospects for sampled and for greedy drafts, if there are any; a mask costs `mask_price`
        more than a draft."""
        known = {sampled: self.acceptance[sampled] for sampled in set(map(_is_sampled, members))}
        return {
            sampled: Prospects(own.worth(price), price, own.lasting, price + mask_price)
            for sampled, own in known.items()
        }

    def _without_masks_that_do_not_pay(
        self,
        least: int,
        prospects: dict[bool, Prospects],
        members: abc.Sequence[Sequence],
        accept: abc.Sequence[list[float]],
        first_price: float,
    ) -> int:
        """Keep the choices, or choose without masks if all masks together are not worth
        `first_price`, the price of there being any; return the step's number of rows."""
        chosen = _choices(members)
        kept_rows = least + sum(choice.rows for choice in chosen)
        if not first_price or not any(any(choice.masks) for choice in chosen):
            return kept_rows
        known = [prospects[_is_sampled(sequence)] for sequence in members]
        plain = [
            best_choice(own, [0] * (1 + len(own)), one, None, sequence.draft_parents)
            if own
            else _NOTHING
            for own, one, sequence in zip(accept, known, members, strict=True)
        ]
        gained = sum(choice.value for choice in chosen) - sum(choice.value for choice in plain)
        if gained >= first_price or not self._fits(least, plain):
            return kept_rows
        for sequence, choice in zip(members, plain, strict=True):
            sequence.choice = choice
        return least + sum(choice.rows for choice in plain)

    def _look_at_some(
        self,
        members: abc.Sequence[Sequence],
        accept: abc.Sequence[list[float]],
        prospects: dict[bool, Prospects],
    ) -> None:
        """Learn from new drafts and the choices made of them; sequences take turns."""
        start = self._steps * _LOOKED_AT
        for place in range(start, start + min(_LOOKED_AT, len(members))):
            sequence, own = members[place % len(members)], accept[place % len(members)]
            # Where all drafts were looked up, masks had no part, and nothing is learnt of them.
            has_masks = any(sequence.draft_probabilities)
            if has_masks and sequence.choice and not sequence.grammar:
                sampled = _is_sampled(sequence)
                self.acceptance[sampled].observe_drafts(
                    own,
                    sequence.choice,
                    prospects[sampled],
                    sequence.draft_parents,
                    sequence.draft_matches,
                )

    def _accept(self, sequence: Sequence) -> list[float]:
        """How likely each draft is accepted if its parent is."""
        if not sequence.drafts:
            return []
        sampled = _is_sampled(sequence)
        accept = self.acceptance[sampled].of(sequence.draft_probabilities)
        if not any(sequence.draft_matches):
            return accept
        known, total = self.ngrams[sampled], [0.0] * (1 + len(accept))
        for index, match in enumerate(sequence.draft_matches):
            if match:
                own = known.likely(match, sequence.ngrams)
                drafted = accept[index] if sequence.draft_probabilities[index] else 0.0
                accept[index] = max(own, drafted)
            total[sequence.draft_parents[index]] += accept[index]
        # Of alternatives at most one is accepted.
        return [
            own / max(1.0, total[parent])
            for own, parent in zip(accept, sequence.draft_parents, strict=True)
        ]

    def observe(self, sequence: Sequence, plan: Plan, outcome: int, committed: int) -> None:
        """Learn from a sequence's step: from the verification of its drafts, or in `confidence`
        from what it committed with masks."""
        if _follows_in_confidence(sequence) and plan.masks:
            self._unseen = self._unseen * _COUNT_DECAY + committed
            self._unseen_steps = self._unseen_steps * _COUNT_DECAY + 1
        if not _is_controlled(sequence):
            return
        self._committed += committed
        if not plan.drafts:
            return
        sampled = _is_sampled(sequence)
        # Where a grammar forces tokens, acceptance says nothing about masks.
        if not sequence.grammar:
            self.acceptance[sampled].observe(plan.confidences, outcome, plan.parents)
        if any(plan.matches):
            self.ngrams[sampled].observe(plan.matches, outcome, plan.parents, sequence.ngrams)


def _choices(members: abc.Sequence[Sequence]) -> list[Choice]:
    return [sequence.choice or _NOTHING for sequence in members]


def _choose_at(
    prospects: dict[bool, Prospects],
    members: abc.Sequence[Sequence],
    accept: abc.Sequence[list[float]],
) -> int:
    """Choose for each member, and return the number of rows that this adds."""
    rows, without_drafts = 0, {}
    for sequence, own in zip(members, accept, strict=True):
        mode = sequence.request.mode
        assert isinstance(mode, VerifiedMode)
        known, rooms = prospects[_is_sampled(sequence)], _rooms(sequence)
        # Of sequences without drafts many are alike.
        choice = without_drafts.get((id(known), rooms[0])) if not own else None
        if choice is None:
            choice = best_choice(own, rooms, known, mode.groups, sequence.draft_parents)
        if not own:
            without_drafts[id(known), rooms[0]] = choice
        sequence.choice = choice
        rows += choice.rows
    return rows


def _probe(sequence: Sequence, most: int) -> None:
    """Give a sequence all its masks, in at most so many rows: if masks were never tried, nothing
    would be learnt of them."""
    drafts = min(first_chain(sequence.draft_parents), max(0, most - 1 - sequence.widest))
    masks = _rooms(sequence)[drafts]
    sequence.choice = Choice(drafts, (*([0] * drafts), masks))


def _is_controlled(sequence: Sequence) -> bool:
    """Whether the sequence's text does not depend on its drafts and masks, or is allowed to."""
    mode = sequence.request.mode
    return isinstance(mode, VerifiedMode) and (
        mode.threshold == 1 or sequence.request.quality is not None
    )


def _follows_in_confidence(sequence: Sequence) -> bool:
    """Whether the sequence commits unseen tokens, by a threshold that is not fixed."""
    mode = sequence.request.mode
    return isinstance(mode, ConfidenceMode) and sequence.request.quality is not None


def _is_sampled(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature > 0


def _look_up(sequence: Sequence) -> None:
    """Add drafts that followed the last tokens where they stood before, as far as they are new.

    Below threshold 1 a draft that is not the model's own choice may pass, and text that repeats
    itself would pull the answer into loops: there is nothing to be looked up then. Behind a prompt
    mostly the template matches, which says nothing of the answer.
    """
    mode = sequence.request.mode
    assert isinstance(mode, VerifiedMode)
    if any(sequence.draft_matches):
        # Of an earlier look, when the sequence had no rows in the step.
        kept = [node for node, own in enumerate(sequence.draft_probabilities, start=1) if own]
        sequence.keep_drafts(kept)
        sequence.draft_matches = [None] * len(kept)
    if not mode.ngram or sequence.threshold < 1 or not sequence.forwards:
        return
    most = min(MOST_NGRAM_DRAFTS, MOST_DRAFTS - len(sequence.drafts), sequence.remaining - 1)
    if most <= 0:
        return
    if sequence.grammar:
        _look_up_within(sequence, most)
        return
    tokens, length = sequence.ngrams.drafts(sequence.tokens, most)
    if not tokens:
        return
    drafts, parents = sequence.drafts.copy(), sequence.draft_parents.copy()
    probabilities, matches = sequence.draft_probabilities.copy(), sequence.draft_matches.copy()
    node, children = 0, children_of(parents)
    for ahead, token in enumerate(tokens):
        others = children[node] if node < len(children) else []
        child = next((one for one in others if drafts[one - 1] == token), None)
        if child:
            matches[child - 1] = Match(length + ahead, "agree")
        else:
            drafts.append(token)
            probabilities.append(0.0)
            parents.append(node)
            matches.append(Match(length + ahead, "differ" if others else "silent"))
            child = len(drafts)
        node = child
    sequence.set_drafts(drafts, probabilities, parents, matches)


def _look_up_within(sequence: Sequence, most: int) -> None:
    """Draft what the grammar forces, or what was looked up and it allows; it can follow only one
    text, so nothing is added to drafts that there are."""
    assert sequence.grammar
    if sequence.drafts:
        return
    if forced := sequence.grammar.forced()[:most]:
        sequence.set_drafts(forced, [1.0] * len(forced))
        return
    tokens, length = sequence.ngrams.drafts(sequence.tokens, most)
    tokens = tokens[: sequence.grammar.admissible(tokens)]
    found: list[Match | None] = [Match(length + ahead, "silent") for ahead in range(len(tokens))]
    sequence.set_drafts(tokens, [0.0] * len(tokens), None, found)


def _leave_out_useless(sequence: Sequence) -> None:
    """Drop drafts that cannot be used: those behind a token that ends the answer, and one for the
    last token, which needs no draft."""
    if not sequence.drafts:
        return
    stop, depths = sequence.request.stop_ids, depths_of(sequence.draft_parents)
    if max(depths) < sequence.remaining and stop.isdisjoint(sequence.drafts):
        return
    nodes = {0}
    for node, parent in enumerate(sequence.draft_parents, start=1):
        is_behind_end = parent > 0 and sequence.drafts[parent - 1] in stop
        if parent in nodes and depths[node] < sequence.remaining and not is_behind_end:
            nodes.add(node)
    sequence.keep_drafts(sorted(nodes)[1:])


def _rooms(sequence: Sequence) -> list[int]:
    """The number of masks that the answer may need behind each node."""
    left, stop = sequence.remaining - 2, sequence.request.stop_ids
    if not sequence.drafts:
        return [max(0, min(sequence.widest, left))]
    depths = depths_of(sequence.draft_parents)
    rooms = [max(0, min(sequence.widest, left - depth)) for depth in depths]
    for node, draft in enumerate(sequence.drafts, start=1):
        if draft in stop:
            rooms[node] = 0
    return rooms
