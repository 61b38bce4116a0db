"""How many masks pay: by the seconds that steps really take, and by the drafts really accepted.

With W masks behind the last draft, a step that has drafts is followed by one that has none, unless
all W were accepted. If s(d) is the share of drafts accepted down to depth d, a share 1 / (2 - s(W))
of steps has drafts, so that

    T/F(W) = 1 + (s(1) + ... + s(W)) / (2 - s(W))

and the best W has the largest T/F(W) per second of its steps. Seconds are noted for each number of
requests, in steps without prompts. Each W that may be the best is tried for some steps, and again
from time to time, because a machine's other work comes and goes. As more masks never make a step
shorter, a larger W cannot be the best if it were not with the seconds of a smaller one.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

# Steps of each W that are timed before it is judged.
TRIED = 8
# So many steps later all are timed again.
AGAIN = 1000
# Steps that still carry what another W has left: drafts, then masks.
_LEFT_OVER = 2
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
        """Whether drafts have been seen at all."""
        return any(self._tried)

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
    to_try: deque[int] = field(default_factory=deque[int])

    def is_timed(self, masks: int) -> bool:
        """Whether enough steps with so many masks are timed."""
        return len(self.seconds[masks]) >= TRIED

    def of_step(self, masks: int) -> float:
        """Seconds of a step with so many masks. They come in two kinds, with drafts and without, so
        this is a mean: of the middle half, which a pause of the machine does not reach."""
        ordered = sorted(self.seconds[masks])
        cut = len(ordered) // 4
        return fmean(ordered[cut : len(ordered) - cut])


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
        while own.to_try and (own.is_timed(own.to_try[0]) or self._is_beaten(own)):
            own.to_try.popleft()
        masks = own.to_try[0] if own.to_try else self._best(own)
        if self._current != (load, masks):
            self._current, self._since = (load, masks), 0
        return masks

    def _value(self, own: _Load, masks: int, timed: int) -> float:
        """Tokens per second with so many masks, if steps took as long as with `timed` masks."""
        return self.acceptance.tokens_per_forward(masks) / own.of_step(timed)

    def _best(self, own: _Load) -> int:
        timed = [masks for masks in range(self._most + 1) if own.is_timed(masks)]
        return max(timed, key=lambda masks: self._value(own, masks, masks))

    def _is_beaten(self, own: _Load) -> bool:
        """Whether what is to be tried next cannot be the best: not with the seconds of fewer
        masks."""
        masks = own.to_try[0]
        fewer = [less for less in range(masks) if own.is_timed(less)]
        if not fewer:
            return False
        best = self._best(own)
        return self._value(own, masks, fewer[-1]) <= self._value(own, best, best)

    def _of(self, load: int) -> _Load:
        if load not in self._loads:
            seconds = [deque[float](maxlen=TRIED) for _ in range(self._most + 1)]
            self._loads[load] = _Load(seconds)
            self._forget(self._loads[load])
        return self._loads[load]

    def _forget(self, own: _Load) -> None:
        for seconds in own.seconds:
            seconds.clear()
        own.to_try = deque(range(self._most + 1))
        if not self.acceptance.is_known:
            own.to_try.appendleft(self._most)


def _load(running: int) -> int:
    """Numbers of requests whose steps count as alike: up to the next power of two."""
    return 1 << (running - 1).bit_length()
