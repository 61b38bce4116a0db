"""The plug-in beside what else vLLM does to requests: caches, chunks, preemption, aborts, grammars,
their own LoRA, tensor parallelism. Each time the text must be that of vLLM without the plug-in."""

import json
from pathlib import Path
from typing import Any

import pytest
from decode.models import pattern

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from decode.adapters import random_adapter
from in_vllm.engines import answers, counts, engine, mars_engine
from model.toys import SHAPE, build

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
PROMPTS = [pattern(start, 1 + start % 3, 3 + start % 7) for start in range(24)]
LONG = [pattern(start, 1 + start % 3, 100) for start in range(8)]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    return engine(checkpoint, max_num_seqs=64)


def test_64_requests_at_once(checkpoint: Path, plain: Any):
    """Guards row offsets where requests of all kinds stand side by side."""
    prompts = [pattern(start, 1 + start % 3, 3 + start % 40) for start in range(64)]
    own = mars_engine(checkpoint, max_num_seqs=64)
    assert answers(own, prompts, max_tokens=30) == answers(plain, prompts, max_tokens=30)
    assert counts(own)["total"]["accepted"][0] > 0


def test_prefix_caching(checkpoint: Path, plain: Any):
    """Guards cached pages: keys of masks must not stay in them."""
    from vllm import SamplingParams

    own = mars_engine(checkpoint, enable_prefix_caching=True, block_size=32)
    expected = answers(plain, LONG, max_tokens=40, ignore_eos=True)
    assert answers(own, LONG, max_tokens=40, ignore_eos=True) == expected
    # The answers' pages are found again, too.
    longer = [[*prompt, *answer] for prompt, answer in zip(LONG, expected, strict=True)]
    params = SamplingParams(temperature=0.0, max_tokens=40, detokenize=False)
    outputs = own.generate([{"prompt_token_ids": ids} for ids in longer], params, use_tqdm=False)
    assert [list(out.outputs[0].token_ids) for out in outputs] == answers(
        plain, longer, max_tokens=40
    )
    assert all(output.num_cached_tokens >= 128 for output in outputs)


def test_chunked_prefill(checkpoint: Path, plain: Any):
    """Prompts come in chunks beside requests with drafts, whose rows a small budget cuts short."""
    own = mars_engine(checkpoint, max_num_batched_tokens=40, max_num_seqs=8)
    mixed = [*PROMPTS[:8], *LONG]
    assert answers(own, mixed, max_tokens=30) == answers(plain, mixed, max_tokens=30)
    assert counts(own)["total"]["accepted"][0] > 0


def test_preemption(checkpoint: Path, plain: Any, monkeypatch: pytest.MonkeyPatch):
    """Pages run out: requests are thrown out, and go on later with masks that vLLM pads."""
    from vllm.v1.core.sched.scheduler import Scheduler

    thrown_out = []
    original = Scheduler._preempt_request

    def preempt(self: Any, request: Any, *rest: Any, **named: Any) -> Any:
        thrown_out.append(request.request_id)
        return original(self, request, *rest, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    own = mars_engine(checkpoint, block_size=32, num_gpu_blocks_override=20)
    prompts = PROMPTS[:16]
    assert answers(own, prompts, max_tokens=60, ignore_eos=True) == answers(
        plain, prompts, max_tokens=60, ignore_eos=True
    )
    assert thrown_out


def test_an_abort_leaves_the_others_alone(checkpoint: Path, plain: Any):
    """In the middle of a batch whose rows lie side by side."""
    from vllm import SamplingParams

    own = mars_engine(checkpoint).llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(PROMPTS[:6]):
        own.add_request(str(index), {"prompt_token_ids": prompt}, params)
    found: dict[str, list[int]] = {}
    steps = 0
    while own.has_unfinished_requests():
        for output in own.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == 5:
            own.abort_request(["2"])
    expected = answers(plain, PROMPTS[:6], max_tokens=40, ignore_eos=True)
    assert len(found["2"]) < 40
    for index in (0, 1, 3, 4, 5):
        assert found[str(index)] == expected[index]


def test_requests_of_their_own_lora(base: Path, good: Path, small_loras: list[Path]):
    """Ordinary LoRAs of requests side by side, all drafted by the draft adapter."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)
    loras = [LoRARequest(str(n), n + 1, str(path)) for n, path in enumerate(small_loras)]
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:10]]
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    texts = []
    own = mars_engine(base, mars={"adapter": str(good)}, **settings)
    for llm in (engine(base, **settings), own):
        outputs = llm.generate(given, params, lora_request=loras * 5, use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    assert texts[0] == texts[1]
    assert counts(own)["total"]["accepted"][0] > 0
    assert texts[0] != answers(engine(base), PROMPTS[:10], max_tokens=30, ignore_eos=True)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_grammar(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Guards masks under a grammar: it must neither end drafting nor let a wrong draft through."""
    from dataclasses import replace

    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from mars_ray.model.directory import fingerprint
    from mars_ray.model.draft_adapter import write_draft_adapter

    monkeypatch.setitem(SHAPE, "hidden_size", 64)
    model, tokenizer = build(architecture, 320)
    directory = tmp_path / "model"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    adapter = random_adapter(model)
    card = replace(adapter.card, base_fingerprint=fingerprint(directory))
    write_draft_adapter(tmp_path / "adapter", replace(adapter, card=card))
    own = mars_engine(directory, mars={"adapter": str(tmp_path / "adapter")}, max_model_len=128)
    plain = engine(directory, max_model_len=128)
    given = [{"prompt_token_ids": [10 + start, 20, 30]} for start in range(6)]
    # A narrow one, and one that many drafts pass.
    for grammar in ({"json": json.dumps(SCHEMA)}, {"regex": "[ -~]{40}"}):
        params = SamplingParams(
            temperature=0.0, max_tokens=60, structured_outputs=StructuredOutputsParams(**grammar)
        )
        texts = [
            [output.outputs[0].text for output in llm.generate(given, params, use_tqdm=False)]
            for llm in (plain, own)
        ]
        assert texts[0] == texts[1]
        assert "json" not in grammar or all(text.startswith("{") for text in texts[1])
    total = counts(own)["total"]
    # All but the steps of prompts.
    assert total["forwards_with_masks"] == total["forwards"] - 2 * len(given)
    assert total["forwards_with_drafts"] > 0


@pytest.mark.slow
def test_compiled(base: Path, good: Path, plain: Any):
    """As vLLM runs by default: the compiler must leave the adapter's operators where they are."""
    own = mars_engine(base, mars={"adapter": str(good)}, enforce_eager=False)
    assert answers(own, PROMPTS, max_tokens=40) == answers(plain, PROMPTS, max_tokens=40)
    assert counts(own)["total"]["accepted"][0] > 0


@pytest.mark.slow
def test_two_ranks(checkpoint: Path, base: Path, good: Path, plain: Any):
    """Each has its part of the adapter, and both choose the same drafts. It comes last: ranks that
    end take the process group of engines in this process with them."""
    expected = answers(plain, PROMPTS[:8], max_tokens=40)
    for model, mars in ((checkpoint, {}), (base, {"adapter": str(good)})):
        own = mars_engine(model, mars=mars, tensor_parallel_size=2)
        try:
            assert answers(own, PROMPTS[:8], max_tokens=40) == expected
            first, second = own.collective_rpc("mars_counts")
            assert first["total"] == second["total"]
            assert first["total"]["accepted"][0] > 0
        finally:
            own.llm_engine.engine_core.shutdown()
