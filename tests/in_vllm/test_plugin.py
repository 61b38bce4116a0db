"""MARS decoding inside vLLM, beside vLLM without it, on tiny models."""

from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from decode.models import MASK, STOP, pattern

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from in_vllm.engines import answers, counts, engine, mars_engine, tokens_per_forward

from mars_ray.errors import EngineError
from mars_ray.vllm import interface

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
PROMPTS = [pattern(start, 1 + start % 3, 3 + start % 5) for start in range(20)]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    return engine(checkpoint)


@pytest.fixture(scope="module")
def mars(checkpoint: Path) -> Any:
    return mars_engine(checkpoint)


@pytest.fixture(scope="module")
def adapted(base: Path, good: Path) -> Any:
    return mars_engine(base, mars={"adapter": str(good)})


@pytest.fixture(params=["mars", "adapted"])
def drafting(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_greedy_text_is_the_models(plain: Any, drafting: Any):
    """Token for token, with at least a token in four from drafts: without any, equality would say
    nothing."""
    expected = answers(plain, PROMPTS, max_tokens=60, stop_token_ids=[STOP])
    before = counts(drafting)
    assert answers(drafting, PROMPTS, max_tokens=60, stop_token_ids=[STOP]) == expected
    assert tokens_per_forward(before, counts(drafting)) > 1.25


def test_greedy_text_is_the_models_in_bfloat16(base: Path, good: Path):
    """Guards rows whose rounding depends on the masks beside them; both sides are eager."""
    plain, own = (
        engine(base, dtype="bfloat16"),
        mars_engine(base, mars={"adapter": str(good)}, dtype="bfloat16"),
    )
    expected = answers(plain, PROMPTS, max_tokens=60)
    before = counts(own)
    assert answers(own, PROMPTS, max_tokens=60) == expected
    assert tokens_per_forward(before, counts(own)) > 1.25


def test_an_adapter_touches_masks_alone(plain: Any, base: Path, wild: Path):
    """Random weights in every layer change what masks say, and no token."""
    own = mars_engine(base, mars={"adapter": str(wild)})
    assert answers(own, PROMPTS, max_tokens=40) == answers(plain, PROMPTS, max_tokens=40)


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"logprobs": 3},
        {"min_tokens": 30, "stop_token_ids": [5, 11]},
        {"allowed_token_ids": [1, 2, 3, 5, 8, 13]},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_sampling_parameters_act_on_every_token(
    plain: Any, drafting: Any, sampling: dict[str, Any]
):
    """Guards parameters that look at tokens before: drafts are some of those, masks are none."""
    expected = answers(plain, PROMPTS, max_tokens=48, **sampling)
    assert answers(drafting, PROMPTS, max_tokens=48, **sampling) == expected


def test_logprobs_are_the_models(plain: Any, drafting: Any):
    """Each token's own, though several come from one step."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    both = [llm.generate(given, params, use_tqdm=False) for llm in (plain, drafting)]
    for expected, found in zip(*both, strict=True):
        rows = zip(expected.outputs[0].logprobs, found.outputs[0].logprobs, strict=True)
        for wanted, own in rows:
            assert wanted.keys() == own.keys()
            for token, value in wanted.items():
                assert own[token].logprob == pytest.approx(value.logprob, abs=1e-3)


def test_sampled_tokens_have_the_models_distribution(plain: Any, drafting: Any, mars: Any):
    """Chi-square of the first eight tokens' joint counts, a false alarm in 1,000: a sampler that
    forgets the temperature of drafts fails by far."""
    many = [PROMPTS[4]] * 3000
    sampling = {"temperature": 1.7, "top_k": 12, "max_tokens": 8, "ignore_eos": True}
    before = counts(drafting)
    found = [answers(llm, many, **sampling) for llm in (plain, drafting)]
    assert counts(drafting)["total"]["accepted"][0] > before["total"]["accepted"][0]
    # In the base of an adapter it is a token like others.
    assert drafting is not mars or all(MASK not in answer for answer in found[1])
    for place in range(8):
        wanted, own = (Counter(answer[place] for answer in each) for each in found)
        assert _chi_square(wanted, own) < _limit(len(wanted | own) - 1), f"token {place}"


def _chi_square(a: Counter[int], b: Counter[int]) -> float:
    """Of two samples of the same size."""
    return sum((a[key] - b[key]) ** 2 / (a[key] + b[key]) for key in a | b)


def _limit(freedom: int) -> float:
    """The value that chance exceeds once in 10,000 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_counts_add_up(mars: Any):
    """Guards T/F: every token is one of a forward, accepted or the model's own."""
    before = counts(mars)
    tokens = sum(map(len, answers(mars, PROMPTS[:4], max_tokens=33, ignore_eos=True)))
    after = counts(mars)
    total, old = after["total"], before["total"]
    accepted = sum(total["accepted"]) - sum(old["accepted"])
    made = total["tokens"] - old["tokens"]
    assert made == total["forwards"] - old["forwards"] + accepted
    # Tokens behind the limit are counted in the step that made them.
    assert tokens <= made <= tokens + 4 * 4
    assert len(after["requests"].keys() - before["requests"].keys()) == 4


def remembered(worker: Any) -> list[str]:
    """The requests that a worker's proposer takes for running ones."""
    own = worker.model_runner.drafter
    return [*own._requests, *own.counts._running, *own.budgets._disagreed]


def test_the_last_requests_are_forgotten_though_none_follows(mars: Any):
    """Guards tables that grow by a request each time that the engine runs out of work."""
    wish = {"extra_args": {"mars": {"budget": 0.5}}}
    answers(mars, PROMPTS[:2], max_tokens=9, ignore_eos=True, **wish)
    assert len(mars.collective_rpc(remembered)[0]) == 6
    mars.llm_engine.step()  # without tokens: it only says what has ended
    assert mars.collective_rpc(remembered) == [[]]


def test_fewer_masks_when_many_run(checkpoint: Path, plain: Any):
    """`masks_by_running` sets masks aside, and the text stays."""
    own = mars_engine(checkpoint, mars={"masks_by_running": [[3, 0]]})
    assert answers(own, PROMPTS[:8], max_tokens=9, ignore_eos=True) == answers(
        plain, PROMPTS[:8], max_tokens=9, ignore_eos=True
    )
    assert counts(own)["total"]["forwards_with_masks"] == 0
    answers(own, PROMPTS[:2], max_tokens=9)
    few = counts(own)["total"]["forwards_with_drafts"]
    assert few > 0
    # Said anew while it runs; and nothing said, so that the engine tries all numbers of masks.
    for masks in ([[1, 4]], []):
        own.collective_rpc("mars_set_masks", args=(masks,))
        assert answers(own, PROMPTS, max_tokens=40) == answers(plain, PROMPTS, max_tokens=40)
        assert counts(own)["total"]["forwards_with_drafts"] > few
        few = counts(own)["total"]["forwards_with_drafts"]


def test_this_vllm_is_as_the_plugin_knows_it():
    """Fails when vLLM changes a method or a class that the plug-in extends."""
    assert interface.differences() == []


def test_a_changed_runner_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Guards against decoding wrongly with another version."""
    monkeypatch.setattr(interface.GPUModelRunner, "_sample", lambda self, logits, other: None)
    with pytest.raises(EngineError, match=r"_sample takes \(logits, other\)"):
        interface.check()


def test_vllm_finds_the_plugin():
    """Without its entry point, grammars would end drafting in every step."""
    names = {point.name: point.value for point in entry_points(group="vllm.general_plugins")}
    assert names["mars"] == "mars_ray.vllm.plugin:register"


def test_thresholds_by_request(plain: Any, checkpoint: Path):
    """Requests at 1 keep the model's text beside others at 0, which accept every draft; and a new
    set-point is for those that name none."""
    own = mars_engine(checkpoint)
    expected = answers(plain, PROMPTS, max_tokens=40, ignore_eos=True)
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=40,
            ignore_eos=True,
            detokenize=False,
            extra_args={"mars": {"threshold": float(index % 2)}},
        )
        for index in range(len(PROMPTS))
    ]
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    before = counts(own)
    outputs = own.generate(given, params, use_tqdm=False)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    assert texts[1::2] == expected[1::2]
    assert texts[0::2] != expected[0::2]
    assert all(MASK not in text for text in texts)
    assert answers(own, PROMPTS, max_tokens=40, ignore_eos=True) == expected
    lossless = counts(own)
    own.collective_rpc("mars_set_threshold", args=(0.0,))
    answers(own, PROMPTS, max_tokens=40, ignore_eos=True)
    relaxed = counts(own)
    assert _accepted_share(lossless, relaxed) == 1
    assert _accepted_share(before, lossless) < 0.98


def _accepted_share(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Of the drafts that were checked between two counts, those accepted."""
    sums = [sum(each["total"][key]) for each in (after, before) for key in ("accepted", "drafted")]
    return (sums[0] - sums[2]) / (sums[1] - sums[3])


def test_a_budget_is_kept_at_every_token(plain: Any, mars: Any):
    """Plain vLLM reads each answer again and says what it would have taken: of no beginning does
    more than the budget differ. Nothing does with a budget of nothing."""
    expected = answers(plain, PROMPTS, max_tokens=40, ignore_eos=True)
    for share in (0.0, 0.3):
        wish = {"extra_args": {"mars": {"budget": share}}}
        found = answers(mars, PROMPTS, max_tokens=40, ignore_eos=True, **wish)
        assert (found == expected) == (share == 0)
        for flags in (others(plain, *pair) for pair in zip(PROMPTS, found, strict=True)):
            assert all(sum(flags[:end]) <= share * end for end in range(1, 41))


def test_a_budget_of_nothing_samples_as_plain_decoding(plain: Any, mars: Any):
    """Chi-square of the first three tokens, a false alarm in 3,000: guards the numbers that are
    drawn here in place of vLLM's."""
    many, sampling = [PROMPTS[4]] * 2000, {"temperature": 1.7, "max_tokens": 3, "ignore_eos": True}
    wish = {"extra_args": {"mars": {"budget": 0.0}}}
    before = counts(mars)["total"]["accepted"][0]
    found = answers(plain, many, **sampling), answers(mars, many, **sampling, **wish)
    assert counts(mars)["total"]["accepted"][0] > before
    for place in range(3):
        wanted, own = (Counter(answer[place] for answer in each) for each in found)
        assert _chi_square(wanted, own) < _limit(len(wanted | own) - 1), f"token {place}"


def others(plain: Any, prompt: list[int], answer: list[int]) -> list[bool]:
    """Whether each token of an answer is another than the likeliest one."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    text = {"prompt_token_ids": [*prompt, *answer]}
    (output,) = plain.generate([text], params, use_tqdm=False)
    rows = output.prompt_logprobs[len(prompt) :]
    return [row[token].rank != 1 for row, token in zip(rows, answer, strict=True)]
