"""The Triton kernels and what is around them, against torch's attention.

Without a GPU the kernels run in Triton's interpreter, and are compiled for GPUs that are not here.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from decode.adapters import good_adapter, random_adapter
from decode.cases import MODES
from decode.models import CARD, MASK, pattern, request, trained_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.decode.attention import paged
from mars_ray.decode.attention.backend import backend_of
from mars_ray.decode.attention.dense import DenseBackend
from mars_ray.decode.attention.paged import PagedBackend, padded_row_counts
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.fused_model import FusedModel
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.decode.request import Request
from mars_ray.decode.scheduler import Work
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies import MaskGroup, Plan
from mars_ray.errors import ConfigError
from mars_ray.model.directory import PLAIN

pytest.importorskip("triton", reason="the kernels are written in Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 64}
# A GPU adds up in another order, with another exponential.
TOLERANCE = 2e-5 if DEVICE.type == "cpu" else 1e-4
PLANS = [
    Plan([]),
    Plan([3, 4], (MaskGroup(2, 4),)),
    Plan([5], (MaskGroup(0, 3), MaskGroup(1, 2))),
    Plan([1, 2, 3, 4], tuple(MaskGroup(after, 4) for after in range(5))),
    Plan([], (MaskGroup(0, 1),)),
    Plan(
        [1, 2, 3, 4, 5],
        (MaskGroup(4, 3), MaskGroup(0, 2), MaskGroup(2, 2)),
        parents=[0, 1, 0, 3, 1],
    ),
]


def both(query_heads: int, key_heads: int, size: int, page_size: int):
    """A dense backend and a paged one, over caches with the same random contents."""
    torch.manual_seed(0)
    shape = {"num_attention_heads": query_heads, "num_key_value_heads": key_heads}
    # Layers differ in nothing that depends on the heads: one of the shapes has several.
    shape |= {"head_dim": size, "num_hidden_layers": 2 if query_heads == key_heads else 1}
    config = Qwen2Config(**SMALL, **shape, initializer_range=0.3)
    model = Qwen2ForCausalLM(config).eval().to(DEVICE)
    runner = FusedModel(model, 400)
    caches = [PagedCache(config, 120, page_size, DEVICE, torch.float32) for _ in range(2)]
    for own, other in zip(caches[0].layers, caches[1].layers, strict=True):
        other.copy_(own.normal_())
    return DenseBackend(runner, caches[0]), PagedBackend(runner, caches[1], 256, 6, 400)


def work_of(plans: list[Plan], starts: list[int], page_size: int) -> list[Work]:
    """Sequences whose pages lie here and there, each with some pending tokens."""
    free = iter(np.random.default_rng(0).permutation(120).tolist())
    work = []
    for index, (plan, start) in enumerate(zip(plans, starts, strict=True)):
        count = 1 + index % 2
        pages = [next(free) for _ in range(-(-(start + count + plan.rows) // page_size))]
        prompt = Request(str(index), (0,), ExactMode(), Sampling(), 300, frozenset())
        sequence = Sequence(prompt, 0, [0] * (start + count), cached=start, pages=pages)
        work.append(Work(sequence, count, plan))
    return work


def states(backend, tables: Tables, ids: np.ndarray):
    """Hidden states of all rows of a forward."""
    backend.forward(tables, ids, tables.positions())
    return backend.hidden(range(len(ids)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "shares"),
    [
        pytest.param((2, 2, 16), 1, marks=pytest.mark.long),
        pytest.param((4, 2, 16), 4, marks=pytest.mark.long),
        pytest.param((7, 1, 32), 1, marks=pytest.mark.long),
        ((7, 1, 32), 4),
    ],
    ids=str,
)
def test_the_kernels_compute_what_torch_computes(heads, shares, monkeypatch):
    """Drafts, groups of masks, page tables, padding of rows; and what they leave in the cache."""
    monkeypatch.setattr(paged, "_shares", lambda programs, processors: shares)
    page_size = 8
    dense, own = both(*heads, page_size)
    for plans, starts in [
        (PLANS[:1], [0]),
        (PLANS[1:2], [7]),
        (PLANS, [0, 130, 65, 20, 3, 61]),
        ([PLANS[3], PLANS[2]], [64, 63]),
        ([Plan(list(range(20)) * 2), PLANS[3]], [10, 40]),  # a prompt beside a step
    ]:
        tables = Tables.of(work_of(plans, starts, page_size), page_size)
        ids = np.arange(len(tables.owner_N)) % 20
        with torch.inference_mode():
            want, got = (states(each, tables, ids) for each in (dense, own))
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
        for mine, other in zip(own.cache.layers, dense.cache.layers, strict=True):
            torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=TOLERANCE)


def test_rows_are_padded_to_few_numbers():
    """Every number of rows has one that is at most a quarter larger, or three rows."""
    counts = padded_row_counts(1024)
    for rows in range(1, 1025):
        padded = next(count for count in counts if count >= rows)
        assert padded - rows < max(4, padded / 5)
    assert len(counts) < 40


@pytest.fixture(scope="module")
def wide_model():
    """Trained, with heads as wide as a matrix unit wants them."""
    return trained_model(num_attention_heads=2, num_key_value_heads=1).to(DEVICE)


@pytest.mark.long
def test_the_engine_says_the_same_with_both(wide_model):
    """Every mode, prompts in chunks beside decoding, sequences that come and go."""
    requests = [
        request(f"{i}-{j}", pattern(j * 3, 1 + j % 4, 2 + 20 * j), mode, max_new_tokens=9)
        for i, mode in enumerate(MODES)
        for j in range(2)
    ]
    size = EngineConfig(max_batch=3, max_context=64, max_step_tokens=40)
    done = {}
    for backend in ("dense", "triton"):
        config = size.model_copy(update={"attention_backend": backend})
        done[backend] = generate_all(Engine(wide_model, CARD, config), requests)
    assert done["triton"] == done["dense"]
    lossless = [c for c in done["triton"] if c.request_id.startswith("1-")]
    assert sum(len(c.tokens) for c in lossless) > 1.5 * sum(c.forwards for c in lossless)


@pytest.mark.long
def test_an_adapters_masks_are_the_same_with_both(wide_model):
    """There its rows are told by a gate: padding and tokens are not its."""
    requests = [
        request(f"{i}-{j}", pattern(j * 3, 1 + j % 4, 2 + 20 * j), mode, max_new_tokens=9)
        for i, mode in enumerate([VerifiedMode(groups=3), ConfidenceMode(threshold=0.2)])
        for j in range(3)
    ]
    done = {}
    for backend in ("dense", "triton"):
        config = EngineConfig(
            max_batch=3, max_context=64, max_step_tokens=40, attention_backend=backend
        )
        adapter = random_adapter(wide_model)
        engine = Engine(wide_model, PLAIN, config, adapter=adapter)
        done[backend] = generate_all(engine, requests)
        engine.set_adapter(engine.fitting(good_adapter(wide_model)))
        done[backend] += generate_all(engine, requests)
    assert done["triton"] == done["dense"]


@pytest.mark.long
def test_an_engine_is_warmed_up_and_says_the_same(wide_model):
    """What warming up leaves in the cache and in the inputs is nobody's."""
    requests = [request(str(j), pattern(j, 2, 5), VerifiedMode()) for j in range(3)]
    config = EngineConfig(
        max_batch=2, max_context=48, max_step_tokens=24, attention_backend="triton"
    )
    dense = config.model_copy(update={"attention_backend": "dense"})
    want = generate_all(Engine(wide_model, CARD, dense), requests)
    engine = Engine(wide_model, CARD, config)
    engine.warm_up()
    assert [c.tokens for c in generate_all(engine, requests)] == [c.tokens for c in want]


def test_a_head_size_that_no_kernel_has_is_refused_or_goes_without():
    """By name it is an error that says what to do; by default other attention is used."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**SMALL, **shape, head_dim=24)
    runner = FusedModel(Qwen2ForCausalLM(config), 64)
    cache = PagedCache(config, 8, 8, runner.device, runner.dtype)
    with pytest.raises(ConfigError, match=r"power of two.*24.*attention_backend='dense'"):
        backend_of(EngineConfig(attention_backend="triton"), runner, cache, 64)
    assert isinstance(backend_of(EngineConfig(), runner, cache, 64), DenseBackend)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mars_ray.decode.attention import kernels

turn = dict(qkv_ptr="*bf16", cos_ptr="*bf16", sin_ptr="*bf16", cache_ptr="*bf16",
    place_ptr="*i64", turn_stride="i32")
tile = dict(query_ptr="*bf16", cache_ptr="*bf16", out_ptr="*OUT", log_sum_ptr="*fp32",
    tile_ptr="*i64", order_ptr="*i64", own_ptr="*i64", clean_ptr="*i64", begin_ptr="*i64",
    bits_ptr="*i64", page_ptr="*i64", query_stride="i32", page_stride="i32", rows="i32",
    scale="fp32")
join = dict(part_ptr="*fp32", log_sum_ptr="*fp32", out_ptr="*bf16", lines="i32")
for heads, shared, size, block in ((2, 7, 64, 64), (4, 7, 128, 64), (8, 4, 128, 64)):
    for shares, out in ((1, "bf16"), (8, "fp32")):
        fixed = dict(KEY_HEADS=heads, SHARED=shared, SIZE=size, PAGE=16, SHARES=shares,
            BLOCK_M=block, BLOCK_C=64)
        kinds = {name: kind.replace("OUT", out) for name, kind in tile.items()}
        turned = dict(QUERY_HEADS=heads * shared, KEY_HEADS=heads, SIZE=size)
        sources = [(kernels.attend_tile, kinds, fixed), (kernels.turn_and_store, turn, turned)]
        if shares > 1:
            sources.append((kernels.join_shares, join, dict(SHARES=shares, SIZE=size)))
        for kernel, signature, fixed in sources:
            signature = signature | dict.fromkeys(fixed, "constexpr")
            source = ASTSource(kernel, signature, constexprs=fixed)
            done = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
            assert done.asm["cubin"]
            print(done.metadata.shared)
"""


@pytest.mark.parametrize(
    ("capability", "shared_memory"),
    [pytest.param(80, 163, marks=pytest.mark.long), (90, 227)],
)
def test_the_kernels_compile_for_gpus(capability, shared_memory, tmp_path):
    """Of Qwen2.5 0.5B and 7B and of Llama 3 8B, within a multiprocessor's shared memory (KiB)."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(int(line) for line in done.stdout.split()) <= shared_memory * 1024


@pytest.mark.gpu
def test_graphs_say_what_single_operations_say(wide_model):
    """Recorded once, replayed with other inputs."""
    model = wide_model
    requests = [request(str(j), pattern(j, 2, 5), VerifiedMode()) for j in range(8)]
    size = EngineConfig(max_batch=4, max_context=64)
    graphs = Engine(model, CARD, size)
    graphs.warm_up()
    dense = Engine(model, CARD, size.model_copy(update={"attention_backend": "dense"}))
    want = [c.tokens for c in generate_all(dense, requests)]
    assert [c.tokens for c in generate_all(graphs, requests)] == want
    assert MASK not in {token for tokens in want for token in tokens}
