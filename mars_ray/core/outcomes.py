"""Which outcomes of a verification are worth preparing for."""

from collections.abc import Sequence

from mars_ray.core.tree import chain, reaches_of

# What is left where probabilities that sum to 1 are subtracted from it is nothing.
_ROUNDING = 1e-6


def likeliest_outcomes(
    probabilities: Sequence[float], count: int, parents: Sequence[int] | None = None
) -> list[int]:
    """At most `count` of the nodes where the step may end, the likeliest first.

    `probabilities` are those with which each of the K drafts is accepted if its parent is; without
    `parents` they are a chain, and a node is the number of drafts accepted. Ties go to the larger
    node.
    """
    parents = chain(len(probabilities)) if parents is None else parents
    ending = [1.0] * (len(parents) + 1)  # how likely no child of a node is accepted
    for parent, probability in zip(parents, probabilities, strict=True):
        ending[parent] -= probability
    reached = reaches_of(parents, probabilities)
    likelihoods = [
        (reach * own if own > _ROUNDING else 0.0, node)
        for node, (reach, own) in enumerate(zip(reached, ending, strict=True))
    ]
    return [node for _, node in sorted(likelihoods, reverse=True)[:count]]
