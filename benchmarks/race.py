"""The README's picture: plain decoding and drafts answer the same question, at their true speed.

    python benchmarks/race.py record CHECKPOINT ADAPTER OUTPUT.json
    python benchmarks/race.py draw OUTPUT.json PICTURE.gif

Each arm is recorded alone, one after the other, and the recordings are shown side by side. A word
that a draft brought is blue: it came in one forward with the token before it.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import Image, ImageDraw, ImageFont

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.data.chat import Message, encode_prompt
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.model.load import stop_ids
from mars_ray.provenance import provenance

QUESTION = "Write a short email to my landlord saying that the kitchen tap drips."
NEW_TOKENS = 120
ARMS: dict[str, Mode] = {"plain decoding": ExactMode(), "with drafts": VerifiedMode()}
WIDTH, HEIGHT, FRAME_S, LAST_S = 880, 400, 0.1, 3.0
INK, GREY, BLUE, PAPER = "#1b1f24", "#8a929c", "#2563c9", "#ffffff"
FONTS = Path(mpl.get_data_path()) / "fonts" / "ttf"


def main() -> None:
    """Record both arms, or draw what was recorded."""
    if sys.argv[1] == "record":
        record(*sys.argv[2:])
    else:
        draw(Path(sys.argv[2]), Path(sys.argv[3]))


def record(checkpoint: str, adapter: str, output: str) -> None:
    """Write the pieces of text of each forward, with their seconds since the question."""
    config = EngineConfig(
        max_batch=1,
        max_context=512,
        threads=2,
        dtype="bfloat16",
        prefix_cache=False,
        draft_adapter=adapter,
    )
    engine, tokenizer = load_engine(checkpoint, config)
    prompt = tuple(encode_prompt([Message("user", QUESTION)], tokenizer))
    result: dict[str, Any] = {"question": QUESTION}
    for name, mode in (*ARMS.items(), *ARMS.items()):  # the first answers warm up
        result[name] = _answer(engine, tokenizer, mode, prompt)
    texts = {"".join(piece for _, pieces in result[arm] for piece in pieces) for arm in ARMS}
    assert len(texts) == 1, "the arms say different things"
    Path(output).write_text(json.dumps(result | {"provenance": provenance()}, indent=1) + "\n")


def _answer(
    engine: Engine, tokenizer: Any, mode: Mode, prompt: tuple[int, ...]
) -> list[tuple[float, list[str]]]:
    stops = stop_ids(engine.model)
    engine.submit(Request("race", prompt, mode, Sampling(), NEW_TOKENS, stops))
    begun, told = time.perf_counter(), []
    while engine.has_work:
        for event in engine.step():
            words = [tokenizer.decode([token]) for token in event.tokens if token not in stops]
            told.append((time.perf_counter() - begun, words))
    return told


@dataclass(slots=True)
class Pen:
    """Writes words from left to right within a column."""

    image: ImageDraw.ImageDraw
    left: int
    right: int
    y: int
    font: ImageFont.FreeTypeFont
    x: float = 0.0

    def write(self, word: str, colour: str) -> None:
        """Write a word, on the next line if this one is full."""
        for number, part in enumerate(word.split("\n")):
            if number:
                self._next_line()
            width = self.font.getlength(part)
            if self.left + self.x + width > self.right:
                self._next_line()
                part = part.lstrip()
            self.image.text((self.left + self.x, self.y), part, font=self.font, fill=colour)
            self.x += self.font.getlength(part)

    def _next_line(self) -> None:
        self.x, self.y = 0.0, self.y + 21


def draw(recorded: Path, picture: Path) -> None:
    """Draw all frames of the race, and hold the last one."""
    result = json.loads(recorded.read_text())
    most = max(result[arm][-1][0] for arm in ARMS)
    frames = [_frame(result, number * FRAME_S) for number in range(int(most / FRAME_S) + 2)]
    small = [frame.quantize(16) for frame in frames]
    durations = [int(1000 * FRAME_S)] * (len(small) - 1) + [int(1000 * LAST_S)]
    small[0].save(
        picture, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True
    )
    frames[-1].save(picture.with_suffix(".png"))


def _frame(result: dict[str, Any], now: float) -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    canvas = ImageDraw.Draw(image)
    plain, bold = (
        ImageFont.truetype(FONTS / f"DejaVuSans{kind}.ttf", 15) for kind in ("", "-Bold")
    )
    canvas.text((24, 16), result["question"], font=bold, fill=INK)
    slowest = max(result[arm][-1][0] for arm in ARMS)
    for number, arm in enumerate(ARMS):
        left = 24 + number * WIDTH // 2
        steps = [(at, words) for at, words in result[arm] if at <= now]
        tokens = sum(len(words) for _, words in steps)
        over = len(steps) == len(result[arm])
        end = result[arm][-1][0] if over else now
        head = f"{arm}: {tokens / max(end, FRAME_S):.0f} tokens/s"
        if over and end < slowest:
            head += f", done in {end:.2f} s ({slowest / end:.2f}x)"
        elif over:
            head += f", done in {end:.2f} s"
        canvas.text((left, 52), head, font=plain, fill=BLUE if over else GREY)
        pen = Pen(canvas, left, left + WIDTH // 2 - 48, 84, plain)
        for _, words in steps:
            for place, word in enumerate(words):
                pen.write(word, BLUE if place else INK)
    facts = result["provenance"]
    machine = f"{facts['cores']} cores of {facts['cpu']}"
    caption = f"SmolLM2-135M-Instruct, bfloat16, one question at a time, {machine}"
    canvas.text((24, HEIGHT - 30), caption, font=plain, fill=GREY)
    return image


if __name__ == "__main__":
    main()
