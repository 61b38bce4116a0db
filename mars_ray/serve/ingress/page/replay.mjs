// Two answers that came one after the other, shown again at once, each at the speed it had.
import { button, drawAnswer } from "./elements.mjs";

// A button that plays them, and ends the play before its time.
export function replayButton(answers) {
  let playing = null;
  const made = button("Play both at their speed", "quiet", () => {
    if (playing) finish(); else play();
  });

  function play() {
    made.textContent = "Show all";
    const begun = performance.now() / 1000, shown = new Map();
    const step = () => {
      const elapsed = performance.now() / 1000 - begun;
      for (const { body, tally } of answers) {
        const end = tally.lengthAt(elapsed);
        if (shown.get(body) !== end) drawAnswer(body, tally.text.slice(0, end), tally.pieces);
        shown.set(body, end);
      }
      if (answers.some(({ tally }) => tally.seconds > elapsed)) playing = requestAnimationFrame(step);
      else finish();
    };
    playing = requestAnimationFrame(step);
  }

  function finish() {
    cancelAnimationFrame(playing);
    playing = null;
    made.textContent = "Play both at their speed";
    for (const { body, tally } of answers) drawAnswer(body, tally.text, tally.pieces);
  }

  return made;
}
