"""The step module and the plain engine: what reaches the head, and what accumulation adds up to."""

import math

import pytest
import torch
from core.rows import MASK, batch_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_ray.config.train import ArObjective, ConstantBlockSize, MarsObjective, OptimizerConfig
from mars_ray.core.layout import NO_TARGET, dense_mask
from mars_ray.core.loss import row_coefficients
from mars_ray.model.forward import output_head
from mars_ray.train.engine import PlainEngine
from mars_ray.train.metrics import RankTimer
from mars_ray.train.model_step import StageObjective, TrainStep, layout_tensors, step_counts
from mars_ray.train.ranks import Ranks

CPU = torch.device("cpu")
MARS = StageObjective(MarsObjective(block_size=ConstantBlockSize(size=2)), 0, MASK)
AR = StageObjective(ArObjective(), 0, MASK)
ROWS = ("pprrrr", "pprrrrrr", "pprrr", "pprr")


def make_step() -> TrainStep:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=MASK + 1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    return TrainStep(Qwen2ForCausalLM(config))


def make_engine(**changes) -> PlainEngine:
    config = OptimizerConfig.model_validate({"learning_rate": 1e-2} | changes)
    ranks = Ranks(0, 1, CPU)
    return PlainEngine(make_step(), config, ranks, bfloat16=False, timer=RankTimer(ranks))


def one_step(engine: PlainEngine, groups: list[tuple[str, ...]], width: int = 8):
    """An optimizer step whose micro-batches are these rows, all padded alike."""
    batches = [batch_of(*rows, "p" * width) for rows in groups]
    layouts = [MARS.layout(batch, 0.0) for batch in batches]
    counts = sum(step_counts([layout]) for layout in layouts)
    local = torch.zeros(3, dtype=torch.float64)
    for index, layout in enumerate(layouts):
        coefficients = row_coefficients(layout, counts[:2], 2.0)
        local += engine.accumulate(layout, coefficients, last=index == len(layouts) - 1)
    return local, engine.step(1e-2)


def test_only_rows_with_a_target_reach_the_head():
    """Guards memory: the vocabulary projection of prompt rows would be thrown away."""
    step = make_step()
    seen = []
    step.model.lm_head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[0]))
    layout = MARS.layout(batch_of(*ROWS), 0.0)
    coefficients = row_coefficients(layout, step_counts([layout])[:2], 1.0)
    step(coefficient_BR=coefficients, **layout_tensors(layout, CPU))
    assert seen == [int((layout.target_BR != NO_TARGET).sum())]
    # Prompts of 2, responses of 4, 6, 3, 2: every response token is a clean target.
    assert int((layout.target_BR[:, :8] != NO_TARGET).sum()) == 15


def test_counts_by_hand():
    """Guards the divisor of the loss and the tokens that speed is counted in."""
    layout = MARS.layout(batch_of("pprrrr", "pprr"), 0.0)
    # Block size 2 on a grid from 0: masks for r0 r1 | r2 r3 predict r1, r2 | r3 and r1.
    counts = step_counts([layout]).tolist()
    clean, noisy, tokens, filled, rows, targets, pairs, masks, clean_pairs = counts
    assert (clean, noisy, tokens) == (6, 4, 10)
    assert (filled, rows, targets) == (14, 2 * (6 + 3), 10)
    # Keys seen: 1 + ... + 6 and 1 + ... + 4 by clean rows, as many as their position + 1 by masks.
    assert (masks, clean_pairs) == (4, 21 + 10)
    assert pairs == 21 + 10 + (3 + 4 + 5) + 3
    assert pairs == dense_mask(layout)[(layout.document_BR >= 0).unsqueeze(1)].sum()


def test_loss_is_the_weighted_sum_of_the_stream_means():
    """Guards the loss against its definition: mean noisy CE + ar_weight * mean clean CE."""
    local, _ = one_step(make_engine(), [ROWS])
    layout = MARS.layout(batch_of(*ROWS, "p" * 8), 0.0)
    clean, noisy = step_counts([layout])[:2].tolist()
    loss, clean_sum, noisy_sum = local.tolist()
    assert loss == pytest.approx(noisy_sum / noisy + 2.0 * clean_sum / clean, rel=1e-5)


def test_micro_batches_add_up_to_the_whole_batch():
    """Guards per-micro-batch means: rows of short micro-batches would weigh more."""
    whole, pieces = make_engine(), make_engine()
    expected, norm = one_step(whole, [ROWS])
    got, norm_of_pieces = one_step(pieces, [ROWS[:1], ROWS[1:3], ROWS[3:]])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm_of_pieces, norm, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pieces.weights(), whole.weights(), rtol=1e-4, atol=1e-5)


def test_head_in_chunks_gives_the_same_loss_and_predictions():
    """Guards the chunked head against losing or doubling rows at its edges."""
    step = make_step()
    layout = MARS.layout(batch_of(*ROWS), 0.0)
    tensors = layout_tensors(layout, CPU)
    coefficients = row_coefficients(layout, step_counts([layout])[:2], 1.0)
    loss, sums = step(coefficient_BR=coefficients, **tensors)
    evaluated, predicted = step(**tensors)
    step.chunk_rows = 4
    loss_in_chunks, sums_in_chunks = step(coefficient_BR=coefficients, **tensors)
    evaluated_in_chunks, predicted_in_chunks = step(**tensors)
    torch.testing.assert_close(loss_in_chunks, loss)
    torch.testing.assert_close(sums_in_chunks, sums)
    torch.testing.assert_close(evaluated, sums)
    torch.testing.assert_close(evaluated_in_chunks, sums)
    assert torch.equal(predicted, predicted_in_chunks)
    assert torch.equal(predicted >= 0, layout.target_BR != NO_TARGET)


@pytest.mark.parametrize("acceptance_weight", [0.0, 1.0])
def test_every_batch_calls_the_head_as_often(acceptance_weight):
    """Guards ranks with unequal rows under ZeRO-3, where each call is a collective of all."""
    step = TrainStep(make_step().model, acceptance_weight)
    step.chunk_rows = 4
    calls = []
    output_head(step.model).register_forward_pre_hook(lambda *_: calls.append(step.training))
    for rows in (ROWS, ("pprr",), ("pppp",)):
        layout = MARS.layout(batch_of(*rows), 0.0)
        tensors = layout_tensors(layout, CPU)
        step.train()(coefficient_BR=torch.ones_like(layout.weight_BR), **tensors)
        step.eval()(**tensors)
    trained, evaluated = calls.count(True), calls.count(False)
    assert (trained, evaluated) == (3 * (1 + (acceptance_weight > 0)), 3)


def test_a_batch_without_targets_costs_nothing_and_breaks_nothing():
    """Guards a rank whose rows were all truncated before their answer: DDP would hang or divide by
    zero."""
    engine = make_engine()
    before = {name: value.clone() for name, value in engine.weights().items()}
    local, norm = one_step(engine, [("pppp",)])
    assert local.tolist() == [0, 0, 0]
    assert norm == 0
    torch.testing.assert_close(engine.weights(), before)
    assert engine.predict(AR.layout(batch_of("ppp"), 0.0))[0].tolist() == [0, 0]


def test_a_step_that_is_not_finite_leaves_the_weights_alone():
    """Guards a checkpoint full of NaN, written after one bad batch."""
    engine = make_engine()
    weights = engine.weights()
    weights["model.embed_tokens.weight"].data[12] = math.inf
    before = {name: value.clone() for name, value in weights.items()}
    _, norm = one_step(engine, [ROWS])
    assert not math.isfinite(norm)
    for name, value in engine.weights().items():
        assert torch.equal(value, before[name]), name


def test_gradients_are_clipped_to_the_given_norm():
    """Guards the clipping: plain SGD-like first Adam steps would hide a missing one."""
    engine = make_engine(max_grad_norm=1e-3)
    layout = MARS.layout(batch_of(*ROWS), 0.0)
    engine.accumulate(layout, row_coefficients(layout, step_counts([layout])[:2], 1.0), last=True)
    parameters = engine._parameters
    seen = []
    engine._optimizer.step = lambda: seen.append(
        math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in parameters))
    )
    norm = engine.step(1.0)
    assert norm > 1e-3
    assert seen == [pytest.approx(1e-3, rel=1e-3)]
