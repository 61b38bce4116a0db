"""The figures of the docs: `python benchmarks/figures.py [--checkpoint MODEL]`.

With a checkpoint, a question is answered again, and `results/answer_trace.json` records which
forward gave which token. The figures are drawn from that file, from measured step costs, and from
the layout and the mask that training uses.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
from lib.live_plot import plot, plot_trade
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ConfidenceMode, ExactMode, Mode, VerifiedMode
from mars_ray.core.layout import TokenBatch, compact_layout, dense_mask
from mars_ray.data.chat import encode_prompt
from mars_ray.data.corpus import problems
from mars_ray.data.sources import Message
from mars_ray.decode.engine import generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.model.load import stop_ids
from mars_ray.provenance import provenance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRACE = RESULTS / "answer_trace.json"
MODES: dict[str, Mode] = {
    "exact": ExactMode(),
    "confidence 0.95": ConfidenceMode(threshold=0.95),
    "verified 1": VerifiedMode(threshold=1.0),
}
_SHOWN = 30  # tokens of the answer
_CLEAN, _NOISY, _GREY = "#0072B2", "#D55E00", "#888888"
_FORWARDS = ("#9ecae1", "#fdd0a2", "#a1d99b", "#dadaeb")


def main() -> None:
    """Write all figures as SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="as of jobs/demo-tiny.toml: answer the question anew")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    if arguments.checkpoint:
        TRACE.write_text(json.dumps(answer_trace(arguments.checkpoint), indent=1) + "\n")
    # A fixed salt makes the same picture the same file.
    matplotlib.rcParams["svg.hashsalt"] = "mars-ray"
    for name, figure in figures().items():
        figure.savefig(arguments.output / f"{name}.svg", metadata={"Date": None})


def figures() -> dict[str, Figure]:
    """The figures by the name of their file."""
    cost = json.loads((RESULTS / "decode_0_5b.json").read_text())
    return {
        "who-sees-whom": who_sees_whom(),
        "answer": answer(json.loads(TRACE.read_text())),
        "live": plot(json.loads((RESULTS / "live.json").read_text())),
        "step-cost": step_cost(cost),
        "trade": plot_trade(json.loads((RESULTS / "trade.json").read_text())),
    }


def answer_trace(checkpoint: str) -> dict[str, Any]:
    """One held-out question, its answer by each mode, and the forward of each token."""
    engine, tokenizer = load_engine(checkpoint, EngineConfig(max_batch=1, max_context=256))
    question = problems("test", 1, seed=4)[0].question
    prompt = tuple(encode_prompt([Message("user", question)], tokenizer))
    answers = {}
    for name, mode in MODES.items():
        request = Request(name, prompt, mode, Sampling(), 128, stop_ids(engine.model))
        (done,) = generate_all(engine, [request])
        texts = [tokenizer.decode([token]) for token in done.tokens]
        answers[name] = {"tokens": texts, "forward": done.token_forward, "forwards": done.forwards}
    return {"question": question, "answers": answers, "provenance": provenance()}


def who_sees_whom() -> Figure:
    """Three prompt tokens, four of a response, blocks of two: the example of core/layout.py."""
    length, prompt = 7, 3
    position_1L = torch.arange(length)[None]
    batch = TokenBatch(
        input_ids_BL=position_1L,
        document_BL=torch.zeros_like(position_1L),
        position_BL=position_1L,
        response_BL=position_1L >= prompt,
    )
    start_1L = torch.tensor([[-1, -1, -1, 3, 3, 5, 5]])
    layout = compact_layout(batch, start_1L, torch.ones(2), mask_token_id=99)
    sees_RR = dense_mask(layout)[0, 0]
    names = [f"p{i}" for i in range(prompt)] + [f"r{i}" for i in range(length - prompt)]
    names += [f"m{i}" for i in range(len(sees_RR) - length)]
    figure = Figure(figsize=(5.6, 5.2), layout="constrained")
    axes = figure.subplots()
    for row, column in sees_RR.nonzero().tolist():
        colour = _NOISY if column >= length else _CLEAN
        axes.add_patch(Rectangle((column, row), 0.92, 0.92, color=colour, alpha=0.8, lw=0))
    targets = layout.target_BR[0].tolist()
    predicted = [f"→ {names[target]}" if target >= 0 else "" for target in targets]
    _grid(axes, names, predicted)
    return figure


def _grid(axes: Axes, names: list[str], predicted: list[str]) -> None:
    places = [index + 0.46 for index in range(len(names))]
    axes.set_xlim(-0.1, len(names))
    axes.set_ylim(len(names), -0.1)
    axes.set_xticks(places, names)
    axes.xaxis.tick_top()
    axes.set_yticks(places, names)
    axes.tick_params(length=0)
    for place, text in zip(places, predicted, strict=True):
        axes.text(len(names) + 0.1, place, text, va="center", color=_GREY)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("this row")
    axes.set_title("sees these tokens (blue) and masks (orange), and predicts", fontsize=10)


def answer(trace: dict[str, Any]) -> Figure:
    """The beginning of one answer by each mode; tokens of one forward share a colour."""
    answers = trace["answers"]
    figure = Figure(figsize=(9.5, 1.2 + 1.05 * len(answers)), layout="constrained")
    for axes, (name, said) in zip(figure.subplots(len(answers)), answers.items(), strict=True):
        place = 0.0
        shown = zip(said["tokens"][:_SHOWN], said["forward"][:_SHOWN], strict=True)
        for text, forward in shown:
            shape = text.replace("\n", "↵")
            width = 0.5 + 0.62 * len(shape)
            colour = _FORWARDS[forward % len(_FORWARDS)]
            box = FancyBboxPatch((place, 0), width, 1, "round,pad=0,rounding_size=0.2", lw=0)
            box.set_facecolor(colour)
            axes.add_patch(box)
            axes.text(place + width / 2, 0.5, shape, ha="center", va="center", family="monospace")
            axes.text(place + width / 2, -0.35, forward, ha="center", va="top", color=_GREY)
            place += width + 0.12
        axes.set_xlim(0, place)
        axes.set_ylim(-0.9, 1.1)
        axes.axis("off")
        each = len(said["tokens"]) / said["forwards"]
        title = f"{name}: {len(said['tokens'])} tokens, {said['forwards']} forwards ({each:.2f})"
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def step_cost(result: dict[str, Any]) -> Figure:
    """The measured cost of a step by positions per sequence, relative to one position for each."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    batches = sorted({step["batch"] for step in result["steps"]})
    for batch in batches:
        steps = [step for step in result["steps"] if step["batch"] == batch]
        one = steps[0]["seconds"]
        positions = [step["positions"] for step in steps]
        costs = [step["seconds"] / one for step in steps]
        axes.plot(positions, costs, marker="o", ms=4, label=f"{batch}")
    most = max(step["positions"] for step in result["steps"])
    axes.plot([1, most], [1, most], color=_GREY, ls=":", lw=1, label="as single forwards")
    axes.set_ylim(0, 0.62 * most)
    axes.set_xlabel("positions of each sequence in a step")
    axes.set_ylabel("time, 1 = one position")
    axes.legend(title="sequences", frameon=False, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
