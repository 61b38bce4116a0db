"""Where a chat template lets a user's message begin and end, and when two messages are the same."""

import copy

import pytest
from model.toys import LLAMA_TEMPLATE, llama_tokenizer

from mars_ray.data.chat import beginning_key, encode_prompt, encoder_of, text_key
from mars_ray.data.sources import Message
from mars_ray.errors import DataError, ModelError
from mars_ray.model.create import CHAT_TEMPLATE

DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' -%}"
    "{{- '<|im_start|>system\nYou help.<|im_end|>\n' -}}{%- endif -%}" + CHAT_TEMPLATE
)


def with_template(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, DEFAULT_SYSTEM])
@pytest.mark.parametrize("system", [None, "You ask about <|im_end|> and apples."])
def test_a_prompt_begins_there(tokenizer, template, system):
    """The tokens are those before the message in any prompt, and the next one ends it."""
    tokenizer = with_template(tokenizer, template)
    turn = encoder_of(tokenizer).user_turn(system)
    told = [Message("system", system)] if system else []
    whole = encode_prompt([*told, Message("user", "apples")], tokenizer)
    count = len(turn.before)
    assert whole[:count] == list(turn.before)
    message = tokenizer.encode("apples", add_special_tokens=False)
    assert whole[count : count + len(message) + 1] == [*message, turn.end_id]
    assert tokenizer.decode(turn.end_id) == "<|im_end|>"


def test_llamas_template_has_one():
    """It begins the text with a token of its own and trims messages."""
    tokenizer = llama_tokenizer()
    turn = encoder_of(tokenizer).user_turn()
    assert turn.before[0] == tokenizer.bos_token_id
    assert tokenizer.decode(turn.end_id) == "<|eot_id|>"


def test_a_space_before_the_message_is_left_to_the_model():
    """Guards a model that begins with a lone space, which it has never seen before a word."""
    spaced = LLAMA_TEMPLATE.replace("+ m.content | trim", "+ '[INST] ' + m.content | trim")
    tokenizer = with_template(llama_tokenizer(), spaced)
    before = encoder_of(tokenizer).user_turn().before
    assert tokenizer.decode(before).endswith("[INST]")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("message['content'] -", "message['content'] * 2 -", "writes a user's message 2 times"),
        (
            "{{- '<|im_start|>' + message['role'] + '\\n' + ",
            "{{- ('' if message['role'] == 'user' else '<|im_start|>assistant\\n') + ",
            "or nothing before it",
        ),
        (
            "{{- '<|im_end|>\\n' -}}{%- endfor -%}{%- if add",
            "{{- ' [/INST]<|im_end|>' -}}{%- endfor -%}{%- if add",
            "without a special token",
        ),
    ],
)
def test_a_template_without_one_is_refused(tokenizer, old, new, reason):
    """Guards prompts that begin in the middle of a turn, or never end."""
    template = CHAT_TEMPLATE.replace(old, new)
    assert template != CHAT_TEMPLATE
    with pytest.raises(ModelError, match=reason):
        encoder_of(with_template(tokenizer, template)).user_turn()


def test_a_template_without_system_messages_says_so(tokenizer):
    """As Gemma's does."""
    refusing = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system') }}"
    tokenizer = with_template(tokenizer, f"{refusing}{{%- endif -%}}{CHAT_TEMPLATE}")
    encoder_of(tokenizer).user_turn()
    with pytest.raises(DataError, match="no system"):
        encoder_of(tokenizer).user_turn("You ask.")


SAME = ["What is  \uff21 cat?", "what is a cat", "  What is a CAT!\n"]


def test_texts_that_are_the_same():
    """Case, spaces, punctuation and forms of characters do not make another prompt; words do."""
    assert len({text_key(text) for text in SAME}) == 1
    assert text_key("What is a dog?") != text_key(SAME[0])


def test_near_duplicates_begin_alike():
    """Sampled prompts often differ in their last words alone; short ones are compared whole."""
    words = "write a python function that takes a list of whole numbers and returns the sum of"
    assert beginning_key(f"{words} all even ones") == beginning_key(f"{words} the odd ones")
    assert beginning_key("What is a cat?") == beginning_key("what is a cat")
    assert beginning_key("What is a cat?") != beginning_key("What is a cat called?")
