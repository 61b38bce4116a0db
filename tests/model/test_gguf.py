"""llama.cpp's files: the weights that transformers reads of them, and the original's tokens."""

import re

import pytest
import torch
from model.small_gguf import F16, F32, Q4_1, Q8_0, write
from model.toys import LLAMA_SPECIAL, LLAMA_TEMPLATE, SHAPE, TEXTS, llama_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mars_ray.errors import ModelError
from mars_ray.model.directory import PLAIN
from mars_ray.model.gguf import load_gguf
from mars_ray.model.load import load_tokenizer, save_model

SIZE = SHAPE | {"vocab_size": 310, "hidden_size": 64, "intermediate_size": 96}
KINDS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZE)),
    "llama-tied-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZE, tie_word_embeddings=True, attention_bias=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZE)),
    # Its heads have a size of their own.
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=64, tie_word_embeddings=True)),
}
SAMPLES = [
    "In 1999 there were 31415 of them, and ¾ or ٣٤ more.",
    "we've  DON'T I'LL\n\n\t  x=3;\r\n",
    "cafe\u0301 Grüße 你好 😀 don\u2019t",
    "McDonald HTMLParser's://path/to",
]


def awake(kind: str):
    """Every parameter random: norms and biases start as ones and zeros."""
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("stored", [F32, F16, Q8_0, Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_that_transformers_reads(kind, stored, tmp_path):
    """To the bit, and the model that they were made from is near: guards heads of Llama models that
    stay in llama.cpp's order, and biases that are left out."""
    model = awake(kind)
    path = write(tmp_path / "tiny.gguf", model, llama_tokenizer(), stored=stored)
    got, _ = load_gguf(path)
    expected = type(model).from_pretrained(
        tmp_path, gguf_file=path.name, config=model.config, dtype=torch.bfloat16
    )
    assert got.dtype == torch.bfloat16
    assert not hasattr(got.config, "quantization_config")
    assert got.state_dict().keys() == expected.state_dict().keys() == model.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(got.state_dict()[name], weight), name
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        near = got.float()(ids).logits - model(ids).logits
    assert near.abs().max() < (1.0 if stored == Q4_1 else 0.1) * model(ids).logits.abs().max()


def taught(step, normalizer=None, *, ignore_merges=False) -> PreTrainedTokenizerFast:
    """A tokenizer as the original model has it."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = step, decoders.ByteLevel()
    if normalizer:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=LLAMA_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # With digits together too: cut in another way, text gets other tokens.
    backend.train_from_iterator([*TEXTS, *SAMPLES] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        chat_template=LLAMA_TEMPLATE,
    )


def split_by(pattern: str):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


ORIGINALS = {
    # tokenizer.json of SmolLM2, Llama 3, Qwen2.5 and Mistral Nemo.
    "smollm": lambda: taught(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    ),
    "llama-bpe": lambda: taught(
        split_by(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        ignore_merges=True,
    ),
    "qwen2": lambda: taught(Qwen2Tokenizer().backend_tokenizer.pre_tokenizer, normalizers.NFC()),
    "tekken": lambda: taught(
        split_by(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        ignore_merges=True,
    ),
}


@pytest.mark.parametrize(
    ("pre", "kind"),
    [
        ("smollm", "llama"),
        ("llama-bpe", "llama"),
        ("tekken", "llama"),
        ("qwen2", "qwen2"),
        ("qwen2", "qwen3"),
    ],
)
def test_text_becomes_the_tokens_of_the_original(pre, kind, tmp_path):
    """Also once it was saved and loaded again, where transformers puts a model type's own steps in
    place of others. Guards digits that stay together: a numbered list cost SmolLM2 34 tokens in
    place of 29, and was less likely by 6 nats."""
    original, model = ORIGINALS[pre](), awake(kind)
    path = write(tmp_path / "tiny.gguf", model, original, pre=pre)
    loaded, tokenizer = load_gguf(path)
    save_model(tmp_path / "saved", loaded, tokenizer, PLAIN)
    again = load_tokenizer(tmp_path / "saved")
    for text in SAMPLES:
        expected = original.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert again.encode(text, add_special_tokens=False) == expected
        begins = [original.bos_token_id] if pre in ("llama-bpe", "tekken") else []
        assert tokenizer.encode(text) == again.encode(text) == begins + expected
    assert again.convert_tokens_to_ids(LLAMA_SPECIAL) == list(range(len(LLAMA_SPECIAL)))
    assert again.chat_template == LLAMA_TEMPLATE


def test_a_sentencepiece_vocabulary_has_no_such_step(tmp_path):
    """As of Llama 2 and of the Mistrals before Nemo: merges are those that the scores imply."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *letters], show_progress=False
    )
    backend.train_from_iterator([*TEXTS, *SAMPLES] * 3, trainer)
    vocabulary = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    model = LlamaForCausalLM(LlamaConfig(**SIZE | {"vocab_size": len(tokens)}))
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [-float(index) for index in range(len(tokens))],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{{ eos_token }}{% endfor %}"
    path = write(
        tmp_path / "tiny.gguf",
        model,
        llama_tokenizer(),
        changes={f"tokenizer.ggml.{name}": value for name, value in fields.items()}
        | {"tokenizer.chat_template": template},
        left_out=("tokenizer.ggml.merges", "tokenizer.ggml.pre"),
    )
    for key, more, left_out in (
        ("it lacks tokenizer.ggml.scores", {}, "scores"),
        ("it lacks tokenizer.ggml.bos_token_id", {}, "bos_token_id"),
        ("add_space_prefix=False", {"add_space_prefix": False}, ""),
    ):
        own = {f"tokenizer.ggml.{name}": value for name, value in (fields | more).items()}
        other = write(
            tmp_path / "other.gguf",
            model,
            llama_tokenizer(),
            changes=own,
            left_out=("tokenizer.ggml.merges", "tokenizer.ggml.pre", f"tokenizer.ggml.{left_out}"),
        )
        with pytest.raises(ModelError, match=key):
            load_gguf(other)
    loaded, tokenizer = load_gguf(path)
    save_model(tmp_path / "saved", loaded, tokenizer, PLAIN)
    again = load_tokenizer(tmp_path / "saved")
    for text in [*SAMPLES, "Tom has 12 apples."]:
        assert again.encode(text) == tokenizer.encode(text) == [1, *backend.encode(text).ids]
        assert again.decode(again.encode(text, add_special_tokens=False)) == text


def test_named_chat_templates_are_taken_up(tmp_path):
    """As llama.cpp's converter writes those of tokenizers that have several."""
    changes = {"tokenizer.chat_templates": ["tool_use"]}
    changes["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    path = write(tmp_path / "tiny.gguf", awake("llama"), llama_tokenizer(), changes=changes)
    _, tokenizer = load_gguf(path)
    assert tokenizer.chat_template == {"default": LLAMA_TEMPLATE, "tool_use": "{{ tools }}"}


def test_ends_of_answers_are_taken_up(tmp_path):
    """Llama 3's files name the end of a turn, of a message to a tool, and of a text."""
    ends = {"eos_token_id": 3, "eot_token_id": 4, "eom_token_id": 5, "padding_token_id": 0}
    changes = {f"tokenizer.ggml.{name}": value for name, value in ends.items()}
    path = write(tmp_path / "tiny.gguf", awake("llama"), llama_tokenizer(), changes=changes)
    model, _ = load_gguf(path)
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == [3, 4, 5]
    assert model.generation_config.pad_token_id == 0


@pytest.mark.parametrize(
    ("changes", "left_out", "message"),
    [
        ({"tokenizer.ggml.pre": "gpt-7"}, (), "tokenizer.ggml.pre=gpt-7; known are smollm"),
        ({}, ("tokenizer.ggml.pre",), "tokenizer.ggml.pre=None"),
        ({"tokenizer.ggml.model": "t5"}, (), "tokenizer.ggml.model=t5"),
        ({"general.architecture": "gemma2"}, (), "of type 'gemma2'; supported are Qwen2"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
            (),
            "rope.scaling.factor=4.0, llama.rope.scaling.type=yarn: import the model that",
        ),
        ({"llama.rope.scaling.factor": 2.0}, (), "rope.scaling.factor=2.0"),
        ({"llama.rope.scale_linear": 2.0}, (), "rope.scale_linear=2.0"),
        ({"llama.rope.scaling.type": "longrope"}, (), "rope.scaling.type=longrope"),
        ({"llama.rope.scaling.attn_factor": 1.5}, (), "rope.scaling.attn_factor=1.5"),
        ({"llama.attention.scale": 0.5}, (), "attention.scale=0.5"),
        ({"llama.attention.causal": False}, (), "attention.causal=False"),
        ({"llama.logit_scale": 0.5}, (), "logit_scale=0.5"),
        ({"llama.expert_count": 8}, (), "expert_count=8"),
        ({"llama.tensor_data_layout": "reference"}, (), "tensor_data_layout=reference"),
        ({"llama.use_parallel_residual": True}, (), "use_parallel_residual=True"),
        ({"general.type": "adapter"}, (), "is no model: its general.type is 'adapter'"),
        ({"split.count": 3}, (), "one of 3 files .split.count.: make one of them with"),
        ({}, ("tokenizer.ggml.merges",), "it lacks tokenizer.ggml.merges"),
        ({}, ("tokenizer.ggml.token_type",), "it lacks tokenizer.ggml.token_type"),
        ({}, ("tokenizer.ggml.tokens",), "see tokenizer.ggml.tokens"),
        ({"llama.attention.sliding_window": 64}, (), "attention.sliding_window=64"),
        ({"llama.rope.dimension_count": 16}, (), "heads of several sizes"),
        ({"llama.attention.head_count_kv": [1, 2]}, (), "attention.head_count_kv"),
        ({}, ("llama.block_count",), "see block_count"),
        ({"llama.block_count": 1}, (), r"on the way from GGUF, blk\.1"),
        ({"llama.block_count": 3}, (), r"lacks blk\.2"),
        ({}, ("blk.0.ffn_up.weight",), r"lacks blk\.0\.ffn_up\.weight"),
        ({"llama.feed_forward_length": 64}, (), r"other sizes than it says, of blk\.0"),
    ],
)
def test_what_would_be_lost_is_refused(changes, left_out, message, tmp_path):
    """Guards a model that answers, and worse than the one that was asked for."""
    path = write(
        tmp_path / "tiny.gguf",
        awake("llama"),
        llama_tokenizer(),
        changes=changes,
        left_out=left_out,
    )
    with pytest.raises(ModelError, match=message):
        load_gguf(path)


NEUTRAL = {
    "no stretch": {"llama.rope.scaling.factor": 1.0},
    "no stretch, in the old way": {"llama.rope.scale_linear": 1.0},
    "linear by nothing": {"llama.rope.scaling.type": "linear"},
    "yarn by nothing": {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 1.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.yarn_log_multiplier": 0.1,
    },
    "type none, which llama.cpp never stretches": {
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 4.0,
    },
    "attention unscaled": {"llama.rope.scaling.attn_factor": 1.0},
    "only told": {"llama.rope.scaling.finetuned": True},
    "heads' own size": {
        "llama.rope.dimension_count": SIZE["hidden_size"] // SIZE["num_attention_heads"]
    },
    "the usual scale": {
        "llama.attention.scale": (SIZE["hidden_size"] // SIZE["num_attention_heads"]) ** -0.5
    },
    "scales of one": {
        "llama.logit_scale": 1.0,
        "llama.residual_scale": 1.0,
        "llama.embedding_scale": 1.0,
    },
    "no clamps, experts or caps": {
        "llama.attention.clamp_kqv": 0.0,
        "llama.expert_count": 0,
        "llama.final_logit_softcapping": 0.0,
        "llama.use_parallel_residual": False,
        "llama.rope.dimension_sections": [0, 0, 0, 0],
    },
    "causal": {"llama.attention.causal": True},
    "a window as wide as the context": {
        "llama.attention.sliding_window": SIZE["max_position_embeddings"]
    },
    "the layout of all": {"llama.tensor_data_layout": "Meta AI original pth"},
    "another norm's number": {"llama.attention.layer_norm_epsilon": 0.001},
    "about the file": {
        "general.file_type": 7,
        "general.quantization_version": 2,
        "general.type": "model",
        "general.license": "mit",
        "general.tags": ["chat", "small"],
        "split.count": 1,
        "quantize.imatrix.file": "x.dat",
    },
    "for other vocabularies": {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.remove_extra_whitespaces": False,
        "tokenizer.ggml.fim_pre_token_id": 3,
    },
}


@pytest.mark.parametrize("changes", NEUTRAL.values(), ids=NEUTRAL)
def test_what_changes_nothing_is_no_loss(changes, tmp_path):
    """Guards a file that is refused for a key that says what is so without it."""
    model, tokenizer = awake("llama"), llama_tokenizer()
    plain, texts = load_gguf(write(tmp_path / "plain.gguf", model, tokenizer))
    got, words = load_gguf(write(tmp_path / "more.gguf", model, tokenizer, changes=changes))
    assert got.config.to_dict() == plain.config.to_dict()
    for name, weight in plain.state_dict().items():
        assert torch.equal(got.state_dict()[name], weight), name
    assert words.encode("Tom has 12 apples.") == texts.encode("Tom has 12 apples.")


@pytest.mark.parametrize(
    "left_out",
    [
        ("llama.rope.freq_base",),
        ("llama.vocab_size",),
        ("llama.attention.key_length", "llama.attention.value_length"),
        ("general.name",),
        ("tokenizer.ggml.bos_token_id",),
    ],
    ids=lambda keys: keys[0],
)
def test_optional_keys_may_be_missing(left_out, tmp_path):
    """Where llama.cpp has a value of its own, or none is needed."""
    model, tokenizer = awake("llama"), llama_tokenizer()
    plain, texts = load_gguf(write(tmp_path / "plain.gguf", model, tokenizer))
    got, words = load_gguf(write(tmp_path / "less.gguf", model, tokenizer, left_out=left_out))
    for name, weight in plain.state_dict().items():
        assert torch.equal(got.state_dict()[name], weight), name
    assert got.config.rope_parameters == plain.config.rope_parameters
    assert got.config.head_dim == plain.config.head_dim
    assert words.encode("Tom has 12 apples.") == texts.encode("Tom has 12 apples.")


def test_as_many_keys_as_queries_need_no_number(tmp_path):
    torch.manual_seed(0)
    heads = SIZE["num_attention_heads"]
    model = LlamaForCausalLM(LlamaConfig(**SIZE | {"num_key_value_heads": heads}))
    left_out = ("llama.attention.head_count_kv",)
    got, _ = load_gguf(write(tmp_path / "tiny.gguf", model, llama_tokenizer(), left_out=left_out))
    assert got.config.num_key_value_heads == heads


def test_biases_that_are_not_there_are_zeros(tmp_path):
    """As llama.cpp has it for a Llama whose outputs have none."""
    model = awake("llama-tied-biased")
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.data.zero_()
    left_out = tuple(f"blk.{index}.attn_output.bias" for index in range(2))
    got, _ = load_gguf(write(tmp_path / "tiny.gguf", model, llama_tokenizer(), left_out=left_out))
    whole, _ = load_gguf(write(tmp_path / "whole.gguf", model, llama_tokenizer()))
    for name, weight in whole.state_dict().items():
        assert torch.equal(got.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("name", "value", "is_lost"),
    [
        ("blk.0.ffn_down.bias", 0.0, False),
        ("blk.0.ffn_down.bias", 0.5, True),
        ("rope_freqs.weight", 1.0, False),
        ("rope_freqs.weight", 8.0, True),
        ("rope_factors_long.weight", 1.0, False),
        ("blk.0.attn_norm_2.weight", 1.0, True),
    ],
)
def test_tensors_that_change_nothing(name, value, is_lost, tmp_path):
    model, tokenizer = awake("llama"), llama_tokenizer()
    more = {name: torch.full((SIZE["hidden_size"],), value)}
    path = write(tmp_path / "tiny.gguf", model, tokenizer, tensors=more)
    if is_lost:
        with pytest.raises(ModelError, match=f"on the way from GGUF, {name}"):
            load_gguf(path)
    else:
        assert load_gguf(path)[0].state_dict().keys() == model.state_dict().keys()


def test_texts_end_as_the_file_says(tmp_path):
    """Guards an end of text that a vocabulary wants and that is dropped."""
    tokenizer = llama_tokenizer()
    changes = {"tokenizer.ggml.add_eos_token": True}
    _, got = load_gguf(write(tmp_path / "tiny.gguf", awake("llama"), tokenizer, changes=changes))
    expected = tokenizer.encode("Tom", add_special_tokens=False)
    assert got.encode("Tom") == [*expected, tokenizer.eos_token_id]
    assert got.encode("Tom", add_special_tokens=False) == expected


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.05, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_refused(share, tmp_path):
    """In its head, in its vocabulary, in its weights."""
    path = write(tmp_path / "tiny.gguf", awake("llama"), llama_tokenizer())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelError, match=f"{re.escape(str(path))} is no GGUF file, or is damaged"):
        load_gguf(path)


def test_another_file_is_no_gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_text("<html>not found</html>" * 100)
    with pytest.raises(ModelError, match="is no GGUF file"):
        load_gguf(path)
