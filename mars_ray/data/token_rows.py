"""Rows of token ids: a model's own answers, exactly as it read and wrote them.

Text that is decoded and encoded again may give other tokens, and a cut answer may end in half a
character; ids do not change. They belong to one tokenizer and mean something else in another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mars_ray.data.chat import ChatEncoder, Message, Plan
from mars_ray.errors import DataError

# Ids are stored as int32 (`rows.py`).
_MOST = 2**31
# Decoding writes this for half a character, as at the end of a cut answer.
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The token ids that a model read, and those that it answered."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def token_row(prompt: object, answer: object) -> TokenRow:
    """The token ids in a row's two fields. Raises ValueError."""
    return TokenRow(_ids(prompt, "prompt_ids"), _ids(answer, "answer_ids"))


def token_plan(
    row: TokenRow, messages: Sequence[Message], encoder: ChatEncoder, max_length: int
) -> Plan:
    """The row's own tokens, of which the answer is the response.

    Raises DataError if nothing of the answer fits `max_length`, or if the ids are visibly of
    another tokenizer: if there are messages, the ids must decode to the last one.
    """
    if len(row.prompt) >= max_length:
        raise DataError(
            f"the prompt's {len(row.prompt)} tokens leave no room in max_length = {max_length}"
        )
    if (most := max(*row.prompt, *row.answer)) >= encoder.vocabulary:
        raise DataError(
            f"token {most} is beyond the tokenizer's {encoder.vocabulary}: the ids are of another "
            "model"
        )
    # An answer may have been cut after its text was written.
    said = encoder.decode(row.answer).rstrip(_BROKEN)
    if messages and not messages[-1].content.startswith(said):
        raise DataError(
            "answer_ids do not say what the last message says: they are of another model's "
            "tokenizer, or the text was changed. Use the model that wrote them, or leave the ids "
            "out"
        )
    prompt = [(token, False) for token in row.prompt]
    return Plan((*prompt, *((token, True) for token in row.answer)))


def _ids(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is not a list of token ids")
    if not all(type(item) is int and 0 <= item < _MOST for item in value):
        raise ValueError(f"{name} holds what is no token id")
    return tuple(value)
