"""What a GGUF file says about its tokenizer and transformers does not take up.

A file names the way in which text is cut before tokens are made of it (`tokenizer.ggml.pre`). Cut
in another way, text becomes other tokens: the model still answers, and worse. The names below are
llama.cpp's (src/llama-vocab.cpp), with what the tokenizer.json of their models holds.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mars_ray.errors import ModelError
from mars_ray.model.load import opened

HOLDS = "a whole model and its tokenizer"

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORD, _SIGNS = r"[^\r\n\p{L}\p{N}]?\p{L}+|", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = _CONTRACTION + _WORD + r"\p{N}{1,3}" + _SIGNS + _SPACE
_QWEN_2 = _CONTRACTION + _WORD + r"\p{N}" + _SIGNS + _SPACE
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACE
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How text becomes words, and words become tokens."""

    split: str | None  # regular expression; None: GPT-2's, after every digit was set apart
    normalizes: bool = False  # to composed characters, which llama.cpp leaves to its callers
    ignores_merges: bool = False  # a word that is a token is taken as it is
    adds_bos: bool = False  # if the file does not say it


_LLAMA = _Kind(_LLAMA_3, ignores_merges=True, adds_bos=True)
_QWEN = _Kind(_QWEN_2, normalizes=True)
_KINDS = {
    "smollm": _Kind(None),
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": _QWEN,
    "tekken": _Kind(_TEKKEN, ignores_merges=True, adds_bos=True),
}
# SentencePiece vocabularies have no such step.
_NONE = (None, "default")


def load_gguf_tokenizer(
    path: Path, *, kind: str, pre: str | None, adds_bos: bool | None
) -> PreTrainedTokenizerBase:
    """A file's tokenizer; the others are its fields of `tokenizer.ggml`, `kind` its `model`.

    Raises ModelError for one that is not known here.
    """
    is_plain = kind == "llama" and pre in _NONE
    if not is_plain and (kind != "gpt2" or pre not in _KINDS):
        raise ModelError(
            f"{path} cuts text in a way that is not known here: tokenizer.ggml.model={kind}, "
            f"tokenizer.ggml.pre={pre}; known are {', '.join(_KINDS)}: import the model that it "
            "was made from"
        )
    tokenizer = opened(
        path, lambda: AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name), holds=HOLDS
    )
    return tokenizer if is_plain else _restored(tokenizer, _KINDS[str(pre)], adds_bos)


def _restored(
    tokenizer: PreTrainedTokenizerBase, step: _Kind, adds_bos: bool | None
) -> PreTrainedTokenizerBase:
    """transformers' tokenizer, cutting text as its file says."""
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(step.split), behavior="isolated")
            if step.split
            else pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step.split is None),
        ]
    )
    if step.normalizes:
        backend.normalizer = normalizers.NFC()
    assert isinstance(backend.model, BPE)
    backend.model.ignore_merges = step.ignores_merges
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=step.adds_bos if adds_bos is None else adds_bos,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **tokenizer.special_tokens_map,
    )
