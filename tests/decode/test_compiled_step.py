"""The compiled step: the same bits whatever rows, sequences, pages, threads and chunks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from decode.adapters import random_adapter
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode, VerifiedMode
from mars_ray.decode.adapter import fused
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.cpu.backend import CompiledBackend
from mars_ray.decode.cpu.library import supported
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.kv_cache import PagedCache, moved_places, page_bytes
from mars_ray.decode.request import Request
from mars_ray.decode.scheduler import Work
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies import MaskGroup, Plan
from mars_ray.errors import EngineError
from mars_ray.model.directory import PLAIN

pytestmark = pytest.mark.skipif(not supported(), reason="no compiled step for this processor")

PAGES, POSITIONS = 120, 700
COMMON = {
    "vocab_size": 301,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
# Sizes that fill no vector, tile or panel; heads with and without biases, norms, a head of its own.
SHAPES = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            **COMMON,
            hidden_size=96,
            intermediate_size=200,
            num_attention_heads=3,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **COMMON,
            hidden_size=112,
            intermediate_size=144,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **COMMON,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=80,
            tie_word_embeddings=False,
        )
    ),
}
ALL = [(shape, instructions) for shape in SHAPES for instructions in supported()]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def made(shape: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(1)
    model = SHAPES[shape]().eval()
    for name, each in model.named_parameters():
        if "norm" in name or "bias" in name:
            each.data += 0.2 * torch.randn_like(each)
    return model.to(dtype)


def backend_with(
    model: PreTrainedModel, instructions: str, threads: int = 2, page_size: int = 16
) -> CompiledBackend:
    compiled = CompiledBackend(model, POSITIONS, instructions, threads, False)
    pages = PAGES * 16 // page_size
    compiled.cache = PagedCache(model.config, pages, page_size, model.device, model.dtype)
    compiled.dtype = torch.float32  # of hidden states: as they are computed, not rounded
    return compiled


def sequence_of(ids: np.ndarray, cached: int, seed: int, page_size: int = 16) -> Sequence:
    """A sequence whose pages lie here and there."""
    pages = np.random.default_rng(seed).permutation(PAGES * 16 // page_size).tolist()
    request = Request(str(seed), (0,), ExactMode(), Sampling(), 10, frozenset())
    return Sequence(request, 0, ids.tolist(), cached=cached, pages=pages)


def run(backend: CompiledBackend, work: list[Work], ids: np.ndarray) -> torch.Tensor:
    """Hidden states and logits of all rows of a step, as one."""
    tables = Tables.of(work, backend.cache.page_size)
    backend.forward(tables, ids, tables.positions())
    rows = range(len(ids))
    return torch.cat([backend.hidden(rows), backend.logits(rows)], dim=1)


def in_chunks(
    backend: CompiledBackend, ids: np.ndarray, chunks: list[int], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a prompt that comes in pieces, and what it leaves in the cache."""
    size, begin, rows = backend.cache.page_size, 0, []
    for count in chunks:
        own = sequence_of(ids[: begin + count], begin, seed, size)
        rows.append(run(backend, [Work(own, count, None)], ids[begin : begin + count]))
        begin += count
    return torch.cat(rows), kept(backend, sequence_of(ids, len(ids), seed, size), len(ids))


def kept(backend: CompiledBackend, sequence: Sequence, count: int) -> torch.Tensor:
    """The keys and values of a sequence's first places, of all layers."""
    place, size = np.arange(count), backend.cache.page_size
    slot = np.array(sequence.pages)[place // size] * size + place % size
    return torch.stack([layer[slot] for layer in backend.cache.layers])


def ids_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 290, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "instructions"), ALL)
def test_any_chunks_of_a_prompt_have_the_same_bits(shape, instructions, dtype):
    """Rows one by one, chunks around every border, page sizes, numbers of threads."""
    model, ids = made(shape, DTYPES[dtype]), ids_of(520)
    want = in_chunks(backend_with(model, instructions), ids, [520])
    assert want[0].isfinite().all()
    for chunks, threads, page_size in [
        ([1] * 66 + [2, 3, 15, 16, 17, 31, 32, 33, 47, 49, 48, 63, 64, 34], 2, 16),
        ([200, 320], 1, 16),
        ([65, 1, 62, 1, 391], 3, 8),
        ([512, 8], 2, 32),
    ]:
        backend = backend_with(model, instructions, threads, page_size)
        got = in_chunks(backend, ids, chunks, seed=threads)
        for own, other in zip(got, want, strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_instruction_sets_have_the_same_bits(shape, dtype):
    """But for AMX, whose products of bfloat16 are summed in another order."""
    model, ids = made(shape, DTYPES[dtype]), ids_of(150)
    names = [name for name in supported() if name != "amx" or dtype == "float32"]
    first, *others = [in_chunks(backend_with(model, name), ids, [1, 149]) for name in names]
    for other in others:
        assert all(map(torch.equal, other, first))


@pytest.mark.parametrize(("shape", "instructions"), ALL)
def test_other_sequences_change_no_bit(shape, instructions):
    """Sequences alone, and with others in one step; and in other places of the cache."""
    model = made(shape)
    backend = backend_with(model, instructions, page_size=1)
    own_pages = np.random.default_rng(5).permutation(PAGES * 16)
    lengths = [1, 40, 127, 128, 129, 300]

    def sequences(cached: bool) -> list[Sequence]:
        made, begin = [], 0
        for index, length in enumerate(lengths):
            own = sequence_of(ids_of(length + 3, index), length if cached else 0, index)
            own.pages = own_pages[begin : begin + length + 3].tolist()
            begin += length + 3
            made.append(own)
        return made

    for sequence in sequences(cached=False):
        head = ids_of(len(sequence.tokens), int(sequence.request.id))[:-3]
        sequence.tokens = head.tolist()
        run(backend, [Work(sequence, len(head), None)], head)
    before = [layer.clone() for layer in backend.cache.layers]
    alone = [
        run(backend, [Work(own, 3, None)], np.array(own.tokens[-3:])) for own in sequences(True)
    ]
    left = [layer.clone() for layer in backend.cache.layers]
    for own, other in zip(backend.cache.layers, before, strict=True):
        own.copy_(other)
    everybody = sequences(True)
    ids = np.concatenate([own.tokens[-3:] for own in everybody])
    together = run(backend, [Work(own, 3, None) for own in everybody], ids)
    assert torch.equal(together, torch.cat(alone))
    assert all(map(torch.equal, backend.cache.layers, left))


@pytest.mark.parametrize("prompt", [5, 126, 250])
@pytest.mark.parametrize(("shape", "instructions"), ALL)
def test_a_branch_that_is_moved_has_the_bits_of_a_chain(shape, instructions, prompt):
    """Drafts see their ancestors only; the accepted branch's keys and values are moved together.
    The masks beside them change nothing."""
    model = made(shape)
    ids = ids_of(prompt + 1)
    # 1 - 2 - 4 and 1 - 3 - 5 - 6: the branch of 3 is accepted.
    drafts, parents, path = [7, 8, 9, 10, 11, 12], [0, 1, 1, 2, 3, 5], [1, 3, 5, 6]
    chain = [ids[-1], *(drafts[node - 1] for node in path)]
    backend = backend_with(model, instructions)
    in_chunks(backend, ids[:-1], [prompt])
    own = sequence_of(np.array([*ids[:-1], *chain]), prompt, 0)
    want = run(backend, [Work(own, len(chain), None)], np.array(chain))
    want_kept = kept(backend, own, prompt + len(chain))

    adapter = fused(random_adapter(model, candidates=0), model)
    backend.set_adapter(adapter)
    for groups in [(), (MaskGroup(6, 2), MaskGroup(0, 1), MaskGroup(4, 2))]:
        backend.cache.layers[0].fill_(torch.nan)
        in_chunks(backend, ids[:-1], [prompt])
        own = sequence_of(ids, prompt, 0)
        plan = Plan(drafts, groups, ("ratio",), parents=parents)
        depth = [index for group in groups for index in range(group.masks)]
        got = run(backend, [Work(own, 1, plan)], np.array([ids[-1], *drafts, *depth]))
        assert torch.equal(got[[0, *path]], want)
        if moves := moved_places(own.pages, backend.cache.page_size, prompt + 1, path):
            backend.cache.move(moves)
        assert torch.equal(kept(backend, own, prompt + len(chain)), want_kept)


@pytest.mark.parametrize(("shape", "instructions"), ALL)
def test_numbers_are_those_of_transformers(shape, instructions):
    """In float32 to rounding; in bfloat16 they are nearer to float32's than transformers' are."""
    ids = ids_of(200)
    with torch.inference_mode():
        exact, rounded = (
            made(shape, dtype)(torch.tensor(ids)[None]).logits[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    for dtype, limit in [(torch.float32, 1e-5 * exact.norm()), (torch.bfloat16, None)]:
        got, _ = in_chunks(backend_with(made(shape, dtype), instructions), ids, [200])
        error = (got[:, -exact.shape[1] :] - exact).norm()
        assert error < (limit or (rounded - exact).norm())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_verified_says_what_exact_says_in_bfloat16(shape, sampling):
    """At every batch and chunk, with prefix hits and with sequences that are sent back to wait."""
    model = made(shape)
    adapter = random_adapter(model, candidates=20)
    shared = ids_of(40, 99).tolist()

    def answers(mode, with_adapter=False, **settings) -> dict[str, tuple[int, ...]]:
        config = EngineConfig(max_context=256, **settings)
        engine = Engine(model, PLAIN, config, adapter=adapter if with_adapter else None)
        prompts = [[*(shared if i % 2 else []), *ids_of(3 + 9 * i, i).tolist()] for i in range(9)]
        requests = [
            Request(str(i), tuple(prompt), mode, sampling, 40, frozenset())
            for i, prompt in enumerate(prompts)
        ]
        done = {each.request_id: tuple(each.tokens) for each in generate_all(engine, requests)}
        state = engine.snapshot()
        assert bool(state.preemptions) == ("cache_bytes" in settings)
        assert bool(state.prefix_hits) == config.prefix_cache
        return done

    want = answers(ExactMode(), max_batch=1, prefix_cache=False)
    assert len(set(want.values())) > 4
    few = 30 * page_bytes(model.config, 16, model.dtype)
    for settings in [
        {"max_batch": 1},
        {"max_batch": 4, "max_step_tokens": 100},
        {"max_batch": 9, "cache_bytes": few},
    ]:
        assert answers(ExactMode(), **settings) == want
        for mode in [VerifiedMode(), VerifiedMode(groups=2, branches=3)]:
            assert answers(mode, with_adapter=True, **settings) == want


def test_every_instruction_set_can_be_chosen():
    """By the setting that a cluster needs whose machines differ."""
    model = made("llama")
    config = EngineConfig(max_context=128, max_batch=2)
    for name in supported():
        own = Engine(model, PLAIN, config.model_copy(update={"cpu_instructions": name}))
        assert own.info.instructions == name
    dense = Engine(model, PLAIN, config.model_copy(update={"attention_backend": "dense"}))
    assert dense.info.instructions is None


def test_an_engine_tells_the_threads_of_its_step():
    """Not torch's, which has one while a step runs; the step's pool has room for 64."""
    model, config = made("llama"), EngineConfig(max_context=128, max_batch=2)
    for asked, has in ((3, 3), (100, 64)):
        engine = Engine(model, PLAIN, config.model_copy(update={"threads": asked}))
        assert engine.info.threads == has


def test_a_number_that_is_none_stays_with_its_sequence():
    """Rows of other sequences do not read it, so they keep their bits."""
    model = made("llama")
    backend = backend_with(model, supported()[0])
    for seed, page in [(0, 0), (1, 10)]:
        own = replace(sequence_of(ids_of(20, seed), 0, seed), pages=list(range(page, page + 9)))
        run(backend, [Work(own, 20, None)], ids_of(20, seed))
    pair = [
        replace(sequence_of(ids_of(21, s), 20, s), pages=list(range(10 * s, 10 * s + 9)))
        for s in (0, 1)
    ]
    work = [Work(own, 1, None) for own in pair]
    want = run(backend, work, np.array([5, 6]))
    backend.cache.layers[0][3] = torch.nan
    tables = Tables.of(work, 16)
    with pytest.raises(EngineError, match="NaN"):
        backend.forward(tables, np.array([5, 6]), tables.positions())
    assert torch.equal(backend.hidden([1])[0], want[1, : backend.hidden_size])
    assert not backend.hidden([0]).isfinite().all()
