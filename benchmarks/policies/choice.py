"""Which setting a policy gets on a trace: the one that did best on the others (leave one out)."""

from collections.abc import Mapping
from dataclasses import dataclass

from policies.contenders import Setting


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting on one trace."""

    attained: bool
    cost: float  # mean replicas over what the trace needs on average


def best_elsewhere(trials: Mapping[str, Mapping[Setting, Trial]], trace: str) -> Setting | None:
    """The setting that attains on the most other traces, and of those that which costs least on
    average over them; None if there is no other trace."""
    others = [by_setting for name, by_setting in trials.items() if name != trace]
    if not others:
        return None

    def rank(setting: Setting) -> tuple[int, float]:
        tried = [by_setting[setting] for by_setting in others]
        return -sum(one.attained for one in tried), sum(one.cost for one in tried)

    return min(others[0], key=rank)
