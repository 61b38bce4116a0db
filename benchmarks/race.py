"""The README's picture: plain decoding and drafts answer the same question, at their true speed.

    python benchmarks/race.py record CHECKPOINT ADAPTER OUTPUT.json
    python benchmarks/race.py draw OUTPUT.json PICTURE.gif

Nine questions are answered, each arm alone, one after the other; the picture shows the recordings
of the question whose ratio is the median, side by side. A word that a draft brought is blue: it
came in one forward with the token before it.
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
from mars_ray.data.chat import encode_prompt
from mars_ray.data.sources import Message
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.model.load import stop_ids
from mars_ray.provenance import provenance

QUESTIONS = (
    "Write a short email to my landlord saying that the kitchen tap drips.",
    "Why does bread rise when it is baked?",
    "Explain to a child why the sky is blue.",
    "How do I list all files of a directory in Python?",
    "Give me five tips for a good night's sleep.",
    "What should I see on a weekend in Lisbon?",
    "Thank a colleague who has helped me to move, in a short note.",
    "Write a poem of eight lines about the sea in winter.",
    "What is the difference between weather and climate?",
)
NEW_TOKENS = 256
ARMS: dict[str, Mode] = {"plain decoding": ExactMode(), "with drafts": VerifiedMode()}
# Beside these, how much of it the text alone brings: n-grams without the adapter's masks.
ALONE = VerifiedMode(window=0)
WIDTH, HEIGHT, FRAME_S, LAST_S = 880, 730, 0.05, 3.0
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
    races: list[dict[str, Any]] = []
    for question in (QUESTIONS[0], *QUESTIONS):  # the first answers warm up
        prompt = tuple(encode_prompt([Message("user", question)], tokenizer))
        arms = {name: _answer(engine, tokenizer, mode, prompt) for name, mode in ARMS.items()}
        alone = _answer(engine, tokenizer, ALONE, prompt)
        every = (*arms.values(), alone)
        texts = {"".join(piece for _, pieces in told for piece in pieces) for told in every}
        assert len(texts) == 1, "the arms say different things"
        plain, drafts, without = (told[-1][0] for told in every)
        ratios = {"ratio": plain / drafts, "without_adapter": plain / without}
        races.append({"question": question} | ratios | arms)
    races = sorted(races[1:], key=lambda race: race["ratio"])
    result = races[len(races) // 2] | {
        "ratios": {race["question"]: round(race["ratio"], 3) for race in races},
        "without_adapter": {race["question"]: round(race["without_adapter"], 3) for race in races},
        "provenance": provenance(),
    }
    Path(output).write_text(json.dumps(result, indent=1) + "\n")


def _answer(
    engine: Engine, tokenizer: Any, mode: Mode, prompt: tuple[int, ...]
) -> list[tuple[float, list[str]]]:
    stops = stop_ids(engine.model)
    engine.submit(Request("race", prompt, mode, Sampling(), NEW_TOKENS, stops))
    begun, told, said, shown = time.perf_counter(), [], [], ""
    while engine.has_work:
        for event in engine.step():
            now, words = time.perf_counter() - begun, []
            for token in event.tokens:
                if token not in stops:
                    said.append(token)
                    # Half a character waits for its other half.
                    text = tokenizer.decode(said).rstrip("\ufffd")
                    words.append(text[len(shown) :])
                    shown = text
            told.append((now, words))
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
    count = f"the median of {len(result['ratios'])} questions"
    for number, line in enumerate(
        (
            f"SmolLM2-135M-Instruct, bfloat16, one question at a time; {count}, by time",
            f"{facts['cores']} cores of {facts['cpu']}",
        )
    ):
        canvas.text((24, HEIGHT - 52 + 21 * number), line, font=plain, fill=GREY)
    return image


if __name__ == "__main__":
    main()
