"""Draft adapters in the engine: as the oracle has them, and nothing of them in what is said."""

from dataclasses import replace

import pytest
import torch
from decode import reference
from decode.adapters import KINDS, good_adapter, random_adapter
from decode.cases import MODES, SAMPLING_NAMES, SAMPLINGS, SCARCE, SIZE, untrained
from decode.models import CARD, SHAPE, pattern, request
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.decode import sampler
from mars_ray.decode.adapter import Gated, Last, fused
from mars_ray.decode.attention.dense import DenseAttention, Group
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.fused_model import FusedModel
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.errors import ModelError, RequestError
from mars_ray.model.directory import PLAIN

VERIFYING = [
    VerifiedMode(),
    VerifiedMode(window=2),
    VerifiedMode(groups=3),
    VerifiedMode(threshold=0.3),
    VerifiedMode(groups=9, threshold=0.5),
]


def items(modes, sampling: Sampling, new: int = 16) -> list:
    return [
        request(
            f"{i}-{j}",
            pattern(j * 3, 1 + j % 4, 2 + j),
            mode,
            sampling=sampling.model_copy(update={"seed": sampling.seed + j}),
            max_new_tokens=new,
        )
        for i, mode in enumerate(modes)
        for j in range(3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        pytest.param(kind, sampling, id=f"{kind}-{name}")
        for kind in KINDS
        for sampling, name in zip(SAMPLINGS, SAMPLING_NAMES, strict=True)
        if kind == "all" or name == "sampled"
    ],
)
def test_engine_is_the_reference_in_every_mode(model, kind, sampling):
    """Every part of an adapter by itself and all together, on a model without a mask token: tokens,
    forwards and finish reasons."""
    adapter = random_adapter(model, **KINDS[kind])
    modes = [mode for mode in MODES if getattr(mode, "window", None) is None]
    requests = items(modes + VERIFYING, sampling, 12)
    got = generate_all(Engine(model, PLAIN, SIZE, adapter=adapter), requests)
    assert got == [reference.generate(model, PLAIN, item, adapter=adapter) for item in requests]


@pytest.mark.parametrize(
    ("head", "sampling"),
    [
        *(pytest.param(True, sampling) for sampling in SAMPLINGS),
        pytest.param(False, SAMPLINGS[0]),
        pytest.param(False, SAMPLINGS[1]),
    ],
    ids=[*(f"head-{name}" for name in SAMPLING_NAMES), "no head-greedy", "no head-sampled"],
)
def test_drafts_that_are_accepted(model, sampling, head):
    """The test above sees few: here most are, and the next step's stand behind many of them. The
    checkpoint's own mask stays what is never said."""
    adapter = good_adapter(model, head=head)
    requests = items(MODES + VERIFYING, sampling)
    for card in (PLAIN, CARD):
        got = generate_all(Engine(model, card, SIZE, adapter=adapter), requests)
        want = [reference.generate(model, card, item, adapter=adapter) for item in requests]
        assert got == want
    if sampling.temperature == 0:
        verified = [c for c, item in zip(got, requests, strict=True) if item.mode == VerifiedMode()]
        assert sum(len(c.tokens) for c in verified) > 1.8 * sum(c.forwards for c in verified)


@pytest.mark.parametrize("size", [SIZE, SCARCE], ids=["ample", "scarce"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_verified_says_what_exact_says_without_an_adapter(architecture, size):
    """Whatever the adapter: greedy and sampled, in company, with pages for little more than one,
    and with a window that is controlled or not."""
    model = untrained(architecture)
    for sampling in (SAMPLINGS[0], SAMPLINGS[2], SAMPLINGS[3]):
        exact = generate_all(Engine(model, PLAIN, size), items([ExactMode()], sampling, 14))
        for kind in ("all", "embeddings", "head"):
            adapter = random_adapter(model, **KINDS[kind])
            engine = Engine(model, PLAIN, size, adapter=adapter)
            requests = items([ExactMode(), VerifiedMode(), VerifiedMode(groups=3)], sampling, 14)
            got = generate_all(engine, requests)
            assert [c.tokens for c in got] == [c.tokens for c in exact] * 3
            assert got[3:] == [
                reference.generate(model, PLAIN, item, adapter=adapter) for item in requests[3:]
            ]


def attention_of(model, rows: int, masks: int) -> DenseAttention:
    """Of one sequence whose last rows are masks."""
    cache = PagedCache(model.config, 8, 8, model.device, model.dtype)
    bias = torch.zeros(rows, 64).masked_fill(torch.ones(rows, 64).triu(1).bool(), -torch.inf)
    bias = bias.repeat_interleave(cache.shared_heads, dim=0)[None, None]
    return DenseAttention(cache, torch.arange(rows), [Group(1, None, torch.arange(8), bias)], None)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("gated", [False, True], ids=["last rows", "by a gate"])
def test_real_rows_never_see_the_adapter(kind, gated):
    """Bit by bit: hidden states of real rows, and what they leave in the cache."""
    model = untrained(kind)
    runner, rows, masks = FusedModel(model, 64), 20, 7
    ids = torch.randint(0, 20, (rows,), generator=torch.Generator().manual_seed(1))
    ids[-masks:] = torch.arange(masks) % 4
    where = Gated((torch.arange(rows) >= rows - masks)[:, None]) if gated else Last(rows - masks)
    said, left = [], []
    for adapter in (None, random_adapter(model)):
        runner.adapter = fused(adapter, model) if adapter else None
        attention = attention_of(model, rows, masks)
        with torch.inference_mode():
            said.append(runner.hidden_states(ids, torch.arange(rows), attention, where))
        left.append(torch.stack(attention.cache.layers))
    assert torch.equal(said[0][:-masks], said[1][:-masks])
    assert torch.equal(left[0][:, : rows - masks], left[1][:, : rows - masks])
    assert not torch.isclose(said[0][-masks:], said[1][-masks:]).any(dim=-1).all()


def test_a_vocabulary_of_its_own_is_found():
    """The compiled step has the head in its own order only: candidates are found there too."""
    torch.manual_seed(0)
    large = SHAPE | {"hidden_size": 512, "vocab_size": 600, "initializer_range": 0.3}
    model = Qwen2ForCausalLM(Qwen2Config(**large)).eval()
    adapter = random_adapter(model, candidates=20)
    requests = items([VerifiedMode(groups=5)], Sampling(), 10)
    want = [reference.generate(model, PLAIN, item, adapter=adapter) for item in requests]
    engine = Engine(model, PLAIN, SIZE, adapter=adapter)
    assert generate_all(engine, requests) == want


def test_logprobs_of_what_the_head_says(model):
    """In `confidence` they are those by which a token was committed; in `verified` the model's."""
    adapter = good_adapter(model)
    exact = request("exact", [1, 2, 3], ExactMode())
    verified = request("verified", [1, 2, 3], VerifiedMode())
    bold = request("bold", [1, 2, 3], ConfidenceMode(threshold=0.0))
    found = {}
    engine = Engine(model, PLAIN, SIZE, adapter=adapter)
    for item in (exact, verified, bold):
        engine.submit(replace(item, logprobs=3))
        found[item.id] = []
    while engine.has_work:
        for event in engine.step():
            found[event.request_id] += zip(event.tokens, event.logprobs, strict=True)
    assert [token for token, _ in found["verified"]] == [token for token, _ in found["exact"]]
    for (_, own), (_, other) in zip(found["verified"], found["exact"], strict=True):
        assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert all(own.top[0] == (token, own.logprob) for token, own in found["bold"])


def test_logprobs_leave_drafts_to_the_compiled_step(model, monkeypatch):
    """Nobody is told those of drafts, so they must not cost `verified` the compiled head."""
    engine = Engine(model, PLAIN, SIZE, adapter=good_adapter(model))
    if not engine.info.instructions:
        pytest.skip("this machine has no compiled step")
    monkeypatch.setattr(sampler, "_Drafts", None)
    engine.submit(replace(request("a", [1, 2, 3], VerifiedMode()), logprobs=3))
    said = []
    while engine.has_work:
        said += engine.step()
    assert not any(event.failure for event in said)
    assert all(len(event.logprobs) == len(event.tokens) for event in said)
    assert any(len(event.tokens) > 1 for event in said)


def run(engine: Engine, steps: int | None = None) -> dict:
    done = {}
    while engine.has_work and steps != 0:
        for event in engine.step():
            assert event.failure is None
            if event.completion:
                done[event.request_id] = event.completion
        engine.check_integrity()
        steps = None if steps is None else steps - 1
    return done


@pytest.mark.parametrize("control", [False, True], ids=["fixed", "controlled"])
def test_an_adapter_is_swapped_and_removed_under_way(model, control):
    """Deeper, shallower, gone and back: the text stays, and replies say whose drafts they had."""
    engine = Engine(model, PLAIN, SIZE.model_copy(update={"max_batch": 4}))
    if control:
        engine.warm_up()
    modes = [ExactMode(), VerifiedMode(), VerifiedMode(groups=4), VerifiedMode(window=3)]
    plain = {
        c.request_id: c for c in generate_all(engine, items([ExactMode()] * 4, Sampling(), 30))
    }
    engine.set_adapter(engine.fitting(good_adapter(model)), "first")
    for item in items(modes, Sampling(), 30):
        engine.submit(item)
    done = {}
    for adapter, name in (
        (random_adapter(model, depths=6), "second"),
        (None, None),
        (good_adapter(model, depths=3, head=False), "third"),
        (good_adapter(model), "first"),
    ):
        done |= run(engine, 2)
        engine.set_adapter(adapter and engine.fitting(adapter), name)
        assert engine.adapter_name == name
    done |= run(engine)
    assert {name: c.tokens for name, c in done.items()} == {n: c.tokens for n, c in plain.items()}
    assert done["0-0"].adapters == ()
    assert done["1-0"].adapters[:2] == ("first", "second")
    alone = generate_all(engine, items([VerifiedMode()], Sampling(), 5))
    assert {c.adapters for c in alone} == {("first",)}


def test_without_an_adapter_masks_are_refused_and_decoding_goes_on(model):
    """Running requests go on without masks; a new one is told how to get an adapter."""
    engine = Engine(model, PLAIN, SIZE, adapter=good_adapter(model))
    for item in items([VerifiedMode(), ConfidenceMode(threshold=0.5)], Sampling(), 20):
        engine.submit(item)
    done = run(engine, 2)
    engine.set_adapter(None)
    with pytest.raises(RequestError, match="give it a draft adapter"):
        engine.submit(request("new", [1, 2], ConfidenceMode()))
    done |= run(engine)
    assert len(done) == 6
    # What was proposed before may be accepted once; after that a forward is a token.
    forwards = done["0-0"].token_forward
    assert len(set(forwards[-10:])) == 10


def test_an_adapter_of_another_model_changes_nothing(model):
    """Refused before it is set: the next step goes on with the last one."""
    engine = Engine(model, PLAIN, SIZE, adapter=good_adapter(model))
    wide = Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"hidden_size": 64}))
    long = Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"num_hidden_layers": 3}))
    narrow = Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"num_key_value_heads": 1}))
    for other, message in (
        (random_adapter(wide), "hidden size 64, and the model 32"),
        (random_adapter(long), r"weights for model\.layers\.2\.\S+, which the model has not"),
        (random_adapter(narrow), r"k_proj have shape \(8, 32\), and the model's \(16, 32\)"),
        (random_adapter(model, depths=63), "no room for the 63 depths"),
    ):
        with pytest.raises(ModelError, match=message):
            engine.fitting(other)
    assert engine.adapter_name == "adapter-1"
    requests = items([VerifiedMode()], Sampling())
    want = [reference.generate(model, PLAIN, i, adapter=good_adapter(model)) for i in requests]
    assert generate_all(engine, requests) == want
