from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mars_ray.data.chat import Encoded, Message, encoder_of


def encode(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """One conversation, as it is tokenised among others."""
    encoder = encoder_of(tokenizer)
    return encoder.encode([encoder.plan(messages)])[0]
