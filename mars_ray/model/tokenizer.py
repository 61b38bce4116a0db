"""The presets' tokenizer: byte-level BPE trained on the job's own texts, and a ChatML template."""

import json
from collections.abc import Iterable
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from mars_ray.errors import ModelError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MASK = "<|mask|>"

# Tools come as a turn of their own before the conversation, and are called in the form of Hermes
# and Qwen2.5 models.
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\nTools:\\n' -}}"
    "{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}"
    '{{- \'A tool is called by <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>\' -}}'
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>\\n' + call['function'] | tojson + '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """At most `vocab_size` tokens, fewer if the texts give no more merges; the same every time.

    Digits are tokens of their own, so that a number is always spelled in one way. Normalisation
    and pre-tokenisation are Qwen2's own: for a Qwen2 model, transformers puts them in place of a
    tokenizer's others when it is loaded, and words would be cut in other places than in training.
    """
    like = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = like.normalizer
    tokenizer.pre_tokenizer = like.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Without half characters, which JSON can spell: a row with one is refused when it is tokenised.
    whole = (text.encode(errors="ignore").decode() for text in texts)
    tokenizer.train_from_iterator(whole, trainer)
    trained: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    # As pairs, which is what it takes in spite of its annotation.
    merges: Any = [tuple(merge) for merge in trained["merges"]]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        extra_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The special token with which the chat template ends an assistant's turn.

    Base models often end texts with another token than their template ends turns with; decoding
    must stop at both. Raises ModelError if there is no template, or it cannot be used, or it ends
    turns with plain text.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template, so conversations cannot be written for it; use "
            "an instruction-tuned version of the model, or put a chat_template.jinja beside it"
        )
    answer = "fine"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ValueError) as error:
        raise ModelError(f"the tokenizer's chat template cannot be used: {error}") from error
    assert isinstance(text, str)
    _, found_answer, tail = text.rpartition(answer)
    if not found_answer:
        raise ModelError("the chat template does not write what the assistant answers")
    found = {
        tail.index(token.content): index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content in tail
    }
    if not found:
        raise ModelError(
            "the chat template ends an assistant's turn without a special token, so decoding could "
            "not know where to stop; add the end-of-sequence token to the template"
        )
    return found[min(found)]
