// One answer on the page: asked for, drawn as it comes, and what is said below it.
import { copyButton, drawAnswer, element } from "./elements.mjs";
import { Means, Tally, modeName, speed } from "./tally.mjs";
import { Refused } from "./service.mjs";

const means = new Means();
// Drawing takes this share of the time at most.
const DRAWING = 0.25;

export class Answer {
  tally = new Tally();
  usage = null; // once it is complete
  refused = null; // why, if it never began
  #finish = null;
  #timer = null; // of a drawing to come
  #next = 0; // when it may be drawn again, in milliseconds

  constructor(kind) {
    this.title = element("span");
    this.rate = element("span", "rate");
    this.bar = element("div");
    this.body = element("div", "answer");
    this.note = element("div", "note");
    const copy = copyButton("the answer", () => this.tally.text);
    this.section = element("section", kind,
      element("h3", "", this.title, this.rate), element("div", "bar", this.bar), this.body,
      element("div", "below", this.note, copy));
  }

  // Ends with the answer, or with why there is no more of it. `inView` is given what changes the
  // page, and does it.
  async ask(service, request, signal, inView) {
    let last;
    try {
      for await (const chunks of service.answer(request, signal)) {
        // One time for all: behind a proxy that gathers them their own would say nothing of speed.
        const now = performance.now() / 1000;
        for (const { usage, choices } of chunks) {
          this.usage = usage || this.usage;
          for (const choice of choices) this.#take(choice, now);
        }
        this.#drawSoon(inView);
      }
      last = this.#summary(request.model);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      this.usage = null;
      if (error instanceof Refused || !(isStopped || this.tally.tokens)) this.refused = error.message;
      this.note.classList.toggle("error", !isStopped);
      last = [this.#sofar(), isStopped ? "stopped" : error.message];
    }
    clearTimeout(this.#timer);
    inView(() => { this.#draw(); this.#say(...last); });
  }

  // For a comparison with another one.
  get outcome() {
    return { text: this.tally.text, rate: this.tally.rate, isWhole: this.usage !== null };
  }

  #take({ delta, mars, finish_reason: finish }, now) {
    this.#finish = finish ?? this.#finish;
    if (mars) this.tally.add(delta.content ?? "", mars.tokens, mars.forward, now);
  }

  #drawSoon(inView) {
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      const begun = performance.now();
      inView(() => { this.#draw(); this.#say(this.#sofar()); });
      const now = performance.now();
      this.#next = now + (now - begun) / DRAWING;
    }, Math.max(0, this.#next - performance.now()));
  }

  #draw() {
    drawAnswer(this.body, this.tally.text, this.tally.pieces);
  }

  #say(parts, ...more) {
    const rest = more.filter(Boolean).map((words) => `, ${words}`).join("");
    const said = parts.map(([number, words]) => [element("b", "", number), ` ${words}`]);
    this.note.replaceChildren(
      ...said.flatMap((part, number) => (number ? [", ", ...part] : part)),
      said.length ? rest : rest.slice(2));
  }

  #sofar() {
    const { tokens, perForward, rate } = this.tally;
    if (!tokens) return [];
    return [[perForward.toFixed(2), "tokens per forward"], [speed(rate), "tokens/s"],
            [String(tokens), "in all"]];
  }

  #summary(model) {
    const { mars, completion_tokens: tokens } = this.usage;
    const mean = means.with(model, mars, tokens);
    const soFar = mean.answers < 2 ? ""
      : ` (${mean.perForward.toFixed(2)} over ${mean.answers} answers)`;
    const adapter = mars.adapter === null ? "" : ` with ${mars.adapter}`;
    const parts = [[mars.tokens_per_forward.toFixed(2), `tokens per forward${soFar}`],
                   [speed(this.tally.rate), "tokens/s"], [String(tokens), "in all"]];
    return [parts, this.#finish === "length" && "cut at the limit", modeName(mars) + adapter,
            `${(100 * mars.disagreement).toFixed(1)}% not the model's own choice`,
            mars.ngram_tokens > 0 && `${mars.ngram_tokens} drafted by n-grams`];
  }
}
