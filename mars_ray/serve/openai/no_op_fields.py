"""Fields of other servers that clients send out of habit, with the values that change nothing here.

Any other value asks for something that this server does not do, and is refused by name. Null is a
field not given, so fields of which only null is harmless need no entry.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mars_ray.serve.openai.wire import Wire


def _is_off(value: bool) -> bool:
    if value:
        raise ValueError("should be false")
    return value


def _is_on(value: bool) -> bool:
    if not value:
        raise ValueError("should be true")
    return value


# A literal would take 0 for false, and the schema says that it is none.
Off = Annotated[bool, AfterValidator(_is_off), Field(json_schema_extra={"const": False})]
On = Annotated[bool, AfterValidator(_is_on), Field(json_schema_extra={"const": True})]
Zero = Annotated[int, Field(ge=0, le=0)]
Nothing = tuple[()]


class AnswerNoOps(Wire):
    """Of chats and completions."""

    service_tier: Literal["auto", "default"] | None = None
    store: Off | None = None
    # A hint: beginnings of prompts are shared whatever it says.
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    use_beam_search: Off | None = None
    early_stopping: Off | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    skip_special_tokens: On | None = None
    # It is about special tokens in the text, and there are none.
    spaces_between_special_tokens: bool | None = None
    detokenize: On | None = None
    bad_words: Nothing | None = None
    watermarking: Off | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=-1)] | None = None
    return_token_ids: Off | None = None
    return_tokens_as_token_ids: Off | None = None
    return_token_offsets: Off | None = None
    return_prompt_text: Off | None = None
    # About images and experts, of which there are none either.
    routed_experts_prompt_start: Zero | None = None
    mm_payload: Literal["tensors", "none"] | None = None


class ChatNoOps(Wire):
    """Of chats only."""

    function_call: Literal["none"] | None = None
    modalities: tuple[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    echo: Off | None = None
    add_generation_prompt: On | None = None
    continue_final_message: Off | None = None
    add_special_tokens: Off | None = None


class CompletionNoOps(Wire):
    """Of completions only."""

    suffix: Literal[""] | None = None


def no_ops_of(kind: type[Wire]) -> set[str]:
    """Names of the fields that do nothing in a body of this kind."""
    bases = (base for base in (AnswerNoOps, ChatNoOps, CompletionNoOps) if issubclass(kind, base))
    return {name for base in bases for name in base.model_fields}
