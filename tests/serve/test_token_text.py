"""The bytes of tokens, which `logprobs` shows."""

from model.toys import llama_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mars_ray.serve.replica.output_processor import TokenBytes

SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}
WORDS = ["\u2581caf", "é", "\u2581été", "ñ", "über", "<0xE9>", "a"]


def test_tokens_of_a_byte_level_vocabulary_join_to_the_text():
    """Characters of several tokens, too."""
    tokenizer = llama_tokenizer()
    of = TokenBytes(tokenizer).of
    text = "12 apples, über é ñ 你好 😀"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(of, tokens)) == text.encode()
    assert of(tokenizer.convert_tokens_to_ids("<|eot_id|>")) == b"<|eot_id|>"


def test_tokens_of_sentencepiece_are_text():
    """Guards é read as the byte that stands behind it in a byte-level vocabulary."""
    vocabulary = SPECIAL | {word: number for number, word in enumerate(WORDS, start=3)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    of = TokenBytes(tokenizer).of
    said = [of(vocabulary[word]) for word in WORDS]
    assert said == [
        b" caf",
        "é".encode(),
        " été".encode(),
        "ñ".encode(),
        "über".encode(),
        b"\xe9",
        b"a",
    ]
