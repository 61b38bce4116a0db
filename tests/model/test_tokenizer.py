import hashlib
import os
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mars_ray.errors import ModelError
from mars_ray.model.create import train_tokenizer
from mars_ray.model.load import end_of_turn_id

TEXTS = ["Tom has 12 apples and gives 5 away to Ann.", "How many apples are left? 12 - 5 = 7."] * 9
# Runs in another process too, so it stands here as text.
FINGERPRINT = """
import hashlib
from mars_ray.model.create import train_tokenizer
texts = ["Tom has 12 apples and gives 5 away to Ann.", "How many apples are left? 12 - 5 = 7."] * 9
text = train_tokenizer(texts, 290).backend_tokenizer.to_str()
print(hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 290)


@pytest.mark.parametrize("text", ["Tom's 3405 apples.\n\n  x", "é🙂 \t\r\nß", "<|im_end|>", ""])
def test_any_text_survives(tokenizer, text):
    """Byte level: also characters never seen in training."""
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_tokens_of_their_own(tokenizer):
    """A number has one spelling: 12 next to 125 would be two unrelated tokens otherwise."""
    assert tokenizer.tokenize("1255") == ["1", "2", "5", "5"]
    assert tokenizer.tokenize(" 12")[-2:] == ["1", "2"]


def test_special_tokens(tokenizer):
    """Their ids are the first four; a turn's end is the end of the text."""
    assert len(tokenizer) == 290
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 3]
    assert set(tokenizer.all_special_ids) == {0, 1, 2, 3}
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (2, 0, 3)
    assert end_of_turn_id(tokenizer) == 2


def test_the_chat_template_writes_chatml(tokenizer):
    """Every role, and the start of an answer."""
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": " a\n"},
        {"role": "user", "content": "v"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\n a\n<|im_end|>\n<|im_start|>user\nv<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_training_is_the_same_in_every_process(tokenizer):
    """With another hash seed: each worker, and each later run, must make the same tokens."""
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    other = subprocess.run(
        [sys.executable, "-c", FINGERPRINT], env=environment, capture_output=True, check=True
    )
    mine = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    assert other.stdout.decode().strip() == mine


def test_saved_and_loaded_as_any_class_it_is_the_same(tokenizer, tmp_path):
    """For Qwen2 models transformers puts in its own pre-tokenizer, whatever was saved.

    The first tokenizer here had another one and gave other tokens after loading, silently.
    """
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer.save_pretrained(tmp_path)
    texts = [*TEXTS, "He's  got 12\n\nof e\u0301", "a<|im_end|>b"]
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        loaded = kind.from_pretrained(tmp_path)
        assert loaded(texts)["input_ids"] == tokenizer(texts)["input_ids"]
        assert loaded.special_tokens_map == tokenizer.special_tokens_map
        assert loaded.chat_template == tokenizer.chat_template


def test_the_end_of_a_turn_is_found_or_refused(tokenizer, tmp_path):
    """Decoding has to stop where the template ends an answer, not only where texts end."""
    tokenizer.save_pretrained(tmp_path)
    other = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    other.eos_token = "<|endoftext|>"
    assert end_of_turn_id(other) == 2
    other.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(ModelError, match="without a special token"):
        end_of_turn_id(other)
    for template in ("{% for %}", "{{ raise_exception('no') }}"):
        other.chat_template = template
        with pytest.raises(ModelError, match="template cannot be used"):
            end_of_turn_id(other)
    other.chat_template = "{{ messages[0].content }}<|im_end|>"
    with pytest.raises(ModelError, match="does not write what the assistant answers"):
        end_of_turn_id(other)
    other.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        end_of_turn_id(other)
