// What is counted of an answer while it comes, and what is said about it.

export class Tally {
  text = "";
  tokens = 0;
  forwards = 0;
  pieces = []; // of the text: { start, end, tokens, at }, each of one forward
  #first = null;
  #last = null;

  // A step's text, its tokens, and the number of its forward, at a time in seconds.
  add(text, tokens, forward, now) {
    const start = this.text.length;
    this.text += text;
    this.tokens += tokens;
    this.forwards = Math.max(this.forwards, forward);
    this.#first ??= { now, tokens: this.tokens };
    this.#last = now;
    // Seconds after the first step.
    if (text) this.pieces.push({ start, end: this.text.length, tokens, at: this.seconds });
  }

  // From the first step to the last.
  get seconds() {
    return this.#first === null ? 0 : this.#last - this.#first.now;
  }

  // How much of the text was there so many seconds after the first step.
  lengthAt(seconds) {
    return this.pieces.findLast(({ at }) => at <= seconds)?.end ?? 0;
  }

  // Tokens per second from the first ones on: what a prompt takes is the same in every mode. Null
  // before there is a second step.
  get rate() {
    return this.seconds > 0 ? (this.tokens - this.#first.tokens) / this.seconds : null;
  }

  get perForward() {
    return this.tokens / Math.max(1, this.forwards);
  }
}

// Tokens and forwards of all answers that were decoded alike.
export class Means {
  #sums = new Map();

  // With one more answer: { answers, perForward } of those decoded like it.
  with(model, { mode, threshold, adapter, forwards }, tokens) {
    const key = JSON.stringify([model, mode, threshold, adapter]);
    const sum = this.#sums.get(key) ?? { answers: 0, tokens: 0, forwards: 0 };
    sum.answers += 1;
    sum.tokens += tokens;
    sum.forwards += forwards;
    this.#sums.set(key, sum);
    return { answers: sum.answers, perForward: sum.tokens / sum.forwards };
  }
}

export function modeName({ mode, threshold }) {
  return threshold === null ? mode : `${mode} at ${Number(threshold.toFixed(2))}`;
}

export function speed(rate) {
  return rate === null ? "–" : rate.toFixed(rate < 9.5 ? 1 : 0);
}

// How the answer's speed compares to that of `exact`, null if one of them came all at once, and
// whether the two texts are the same: as far as the shorter one came, if one of them was stopped.
// Null while there is nothing to compare.
export function verdict(ours, exact) {
  if (!ours.text || !exact.text) return null;
  const isWhole = ours.isWhole && exact.isWhole;
  const [a, b] = [ours.text, exact.text];
  const isSame = isWhole ? a === b : a.startsWith(b) || b.startsWith(a);
  const text = isSame ? `the same text${isWhole ? "" : " as far as both came"}` : "another text";
  const times = ours.rate && exact.rate ? (ours.rate / exact.rate).toFixed(2) : null;
  return { times, text };
}
