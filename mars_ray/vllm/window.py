"""How many masks pay: by the seconds that steps really take, and by the drafts really accepted.

With W masks behind the last draft, a step that has drafts is followed by one that has none, unless
all W were accepted. If s(d) is the share of drafts accepted down to depth d, a share 1 / (2 - s(W))
of steps has drafts, so that

    T/F(W) = 1 + (s(1) + ... + s(W)) / (2 - s(W))

and the best W has the largest T/F(W) per second of its steps. Seconds are noted for each number of
requests, in steps without prompts. Each W is tried for some steps, fewer if it is far behind, and
again from time to time, because a machine's other work comes and goes.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Steps of each W that are timed before it is judged; their median counts. A W that a few show to be
# this far behind the best one is given up: trying costs what is lost by it.
TRIED = 8
_GLANCE = 4
_BEHIND = 0.85
# So many steps later all are timed again.
AGAIN = 1000
# Steps that still carry what another W has left: drafts, then masks.
_LEFT_OVER = 2
# First drafts that must have been tried, by whatever load, before acceptance says much.
_KNOWN = 12
# Drafts at each depth that count for as many as were seen, half of them accepted.
_PRIOR = 8.0
# Beyond so many, what was seen long ago counts less and less.
_MEMORY = 4000.0


class Acceptance:
    """Shares of drafts accepted, by depth."""

    def __init__(self, depths: int) -> None:
        self._tried = [0.0] * depths
        self._accepted = [0.0] * depths

    def add(self, drafts: int, accepted: int) -> None:
        """Note a step's drafts: one behind the first rejected was not tried."""
        for depth in range(min(drafts, accepted + 1)):
            self._tried[depth] += 1
            self._accepted[depth] += depth < accepted
            if self._tried[depth] > _MEMORY:
                self._tried[depth] /= 2
                self._accepted[depth] /= 2

    @property
    def is_known(self) -> bool:
        """Whether enough has been seen to give up a W early."""
        return bool(self._tried) and self._tried[0] >= _KNOWN

    def tokens_per_forward(self, masks: int) -> float:
        """Expected T/F with so many masks."""
        survival, sum_of = 1.0, 0.0
        for tried, accepted in zip(self._tried[:masks], self._accepted[:masks], strict=True):
            survival *= (accepted + _PRIOR / 2) / (tried + _PRIOR)
            sum_of += survival
        return 1 + sum_of / (2 - survival) if masks else 1.0


@dataclass(slots=True)
class _Load:
    """The steps timed while about so many requests ran."""

    seconds: list[deque[float]]
    steps: int = 0
    to_try: list[int] = field(default_factory=list)


class Window:
    """The choice of W, step by step."""

    def __init__(self, most: int) -> None:
        """With at most so many masks."""
        self.acceptance = Acceptance(most)
        self._most = most
        self._loads: dict[int, _Load] = {}
        self._current: tuple[int, int] | None = None  # load and W of the steps lately
        self._since = 0  # steps since they are the same

    def note(self, running: int, seconds: float | None) -> None:
        """Note a step of so many requests; None if it held prompts or nobody knows its seconds."""
        if self._current is None or self._current[0] != _load(running) or seconds is None:
            self._since = 0
            return
        self._since += 1
        load, masks = self._current
        if self._since > _LEFT_OVER:
            self._of(load).seconds[masks].append(seconds)

    def choose(self, running: int) -> int:
        """Masks of each request in the next step."""
        load = _load(running)
        own = self._of(load)
        own.steps += 1
        if own.steps % AGAIN == 0:
            self._forget(own)
        self._judge(own)
        masks = own.to_try[0] if own.to_try else self._best(own)
        if self._current != (load, masks):
            self._current, self._since = (load, masks), 0
        return masks

    def _judge(self, own: _Load) -> None:
        """Take those off the list that have been tried enough."""
        while own.to_try:
            masks = own.to_try[0]
            behind = self._is_behind(own, masks)
            if not behind and len(own.seconds[masks]) < TRIED:
                return
            own.to_try.pop(0)
            if behind and masks and self._is_behind(own, masks - 1):
                own.to_try.clear()  # more rows would not bring it back

    def _is_behind(self, own: _Load, masks: int) -> bool:
        """Whether a few steps show that a W is far behind the best one."""
        if len(own.seconds[masks]) < _GLANCE or not self.acceptance.is_known:
            return False
        tried = [each for each, seconds in enumerate(own.seconds) if len(seconds) >= TRIED]
        best = max((self._speed(own, each) for each in tried), default=0.0)
        return self._speed(own, masks) < _BEHIND * best

    def _best(self, own: _Load) -> int:
        tried = [each for each, seconds in enumerate(own.seconds) if seconds]
        return max(tried, key=lambda masks: self._speed(own, masks))

    def _speed(self, own: _Load, masks: int) -> float:
        """Expected tokens per second of a request."""
        return self.acceptance.tokens_per_forward(masks) / median(own.seconds[masks])

    def _of(self, load: int) -> _Load:
        if load not in self._loads:
            seconds = [deque[float](maxlen=TRIED) for _ in range(self._most + 1)]
            self._loads[load] = _Load(seconds)
            self._forget(self._loads[load])
        return self._loads[load]

    def _forget(self, own: _Load) -> None:
        for seconds in own.seconds:
            seconds.clear()
        # From none on, so that what costs most is left out if less is too much; but as long as
        # acceptance is not known, the most masks first, which teach most of it.
        most = [] if self.acceptance.is_known else [self._most]
        own.to_try = [*most, *range(self._most + 1 - len(most))]


def _load(running: int) -> int:
    """Numbers of requests whose steps count as alike: up to the next power of two."""
    return 1 << (running - 1).bit_length()
