"""Which outcomes of a verification are worth preparing for."""

from collections.abc import Sequence


def likeliest_outcomes(probabilities: Sequence[float], count: int) -> list[int]:
    """At most `count` of the outcomes 0 .. K, the number of drafts accepted, the likeliest first.

    `probabilities` are those with which each of the K drafts is accepted if the ones before it are.
    Ties go to the larger outcome.
    """
    likelihoods = []
    reached = 1.0
    for outcome, probability in enumerate(probabilities):
        likelihoods.append((reached * (1 - probability), outcome))
        reached *= probability
    likelihoods.append((reached, len(probabilities)))
    return [outcome for _, outcome in sorted(likelihoods, reverse=True)[:count]]
