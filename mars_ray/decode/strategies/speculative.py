"""`speculative`: a draft model continues what the masks began (paper, section 4.6).

The drafts of a step are the proposals of the previous step's masks, followed by the draft model's
tokens. All are verified as in `verified`, and by default every outcome gets a group of masks.
"""

from mars_ray.config.modes import SpeculativeMode
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.verified import Verified


class Speculative(Verified):
    """As `verified`, with a draft model's tokens from the second forward on; the first forward is
    that of the prompt."""

    def drafts_wanted(self, sequence: Sequence) -> int:
        mode = sequence.request.mode
        assert isinstance(mode, SpeculativeMode)
        return mode.draft_tokens if sequence.extended < sequence.forwards else 0
