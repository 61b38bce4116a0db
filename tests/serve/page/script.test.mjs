// The page's pure functions, without a browser: node --test script.test.mjs
import assert from "node:assert/strict";
import { test } from "node:test";

const PAGE = new URL("../../../mars_ray/serve/ingress/page/", import.meta.url);
const { blocksOf } = await import(new URL("markdown.mjs", PAGE));
const { cut } = await import(new URL("marks.mjs", PAGE));
const { chunksOf } = await import(new URL("service.mjs", PAGE));
const { Means, Tally, modeName, speed, verdict } = await import(new URL("tally.mjs", PAGE));

const leaves = (node) => (node.children ? node.children.flatMap(leaves) : [node]);
const tags = (node) => (node.children ? [node.tag, ...node.children.flatMap(tags)] : []);
const all = (source) => ({ children: blocksOf(source) });
const textOf = (source) => leaves(all(source)).map(({ text }) => text).join("");

const EVERYTHING = `# Title

A *word* and **two words** with \`code\`, ~~gone~~ and [a link](https://example.org).
A second line.

> quoted
> twice

- [x] done
- open
  1. inner

| a | b |
|---|---|
| 1 | 2 |

\`\`\`python
def f(x):
    return x
\`\`\`

---
`;

test("every kind of block becomes the element of that kind", () => {
  const seen = new Set(tags(all(EVERYTHING)));
  const wanted = ["h3", "p", "em", "strong", "code", "del", "a", "blockquote", "ul", "ol", "li",
                  "table", "tr", "th", "td", "pre", "hr"];
  for (const tag of wanted) assert.ok(seen.has(tag), tag);
  assert.equal(blocksOf("```python\nx\n").at(0).language, "python");
});

test("a text stands where its start says, so that the right tokens are marked", () => {
  const found = leaves(all(EVERYTHING)).filter(({ start }) => start !== null);
  assert.ok(found.length > 20);
  for (const { text, start } of found) assert.equal(EVERYTHING.slice(start, start + text.length), text);
  const starts = found.map(({ start }) => start);
  assert.deepEqual(starts, [...starts].sort((a, b) => a - b));
});

test("no text of an answer makes a tag or an address of its own", () => {
  const evil = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a <b onclick='x'>b</b> c",
    "[x](javascript:alert(1))", "[x](JaVaScRiPt:alert(1))", "[x](java\tscript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)", "<javascript:alert(1)>",
    "![x](javascript:alert(1))", "[x](vbscript:x)", "[x](//evil.example)", "[x](/v1/models)",
    "[x][y]\n\n[y]: javascript:alert(1)", "<a href='https://x'>x</a>",
    "| <script>x</script> |\n|---|\n| <iframe src=x> |", "> <style>*{}</style>",
    "```<script>\nx\n```", "<svg/onload=alert(1)>", "<!-- x --> <![CDATA[x]]>",
  ];
  const known = new Set(["p", "pre", "code", "table", "tr", "th", "td", "blockquote"]);
  for (const source of evil) {
    for (const tag of tags(all(source)).slice(1)) assert.ok(known.has(tag), `${source}: ${tag}`);
  }
});

test("what looks like HTML is shown as it is", () => {
  assert.equal(textOf("a <b>x</b>"), "a <b>x</b>");
  assert.equal(textOf("<script>alert(1)</script>"), "<script>alert(1)</script>");
  assert.equal(textOf("[x](javascript:alert(1))"), "[x](javascript:alert(1))");
});

test("an answer that the parser cannot take is shown as it is", () => {
  const deep = ">".repeat(20_000);
  assert.deepEqual(tags(all(deep)).slice(1), ["p"]);
  assert.equal(textOf(deep), deep);
  const long = "word ".repeat(20_000);
  assert.equal(textOf(long), long);
});

test("half an answer is shown while the rest is on its way", () => {
  for (let end = 0; end <= EVERYTHING.length; end += 1) blocksOf(EVERYTHING.slice(0, end));
  assert.equal(blocksOf("```js\nx = 1").at(0).tag, "pre");
});

test("a text is cut where forwards end", () => {
  const pieces = [{ start: 0, end: 4, tokens: 1 }, { start: 4, end: 9, tokens: 3 },
                  { start: 9, end: 12, tokens: 2 }];
  assert.deepEqual(cut("abc", 2, pieces), [{ text: "ab", tokens: 1 }, { text: "c", tokens: 3 }]);
  assert.deepEqual(cut("xyz!", 10, pieces), [{ text: "xy", tokens: 2 }, { text: "z!", tokens: null }]);
  assert.deepEqual(cut("abc", null, pieces), [{ text: "abc", tokens: null }]);
  const whole = "abcdefghijkl";
  assert.equal(cut(whole, 0, pieces).map(({ text }) => text).join(""), whole);
});

async function* texts(...given) { yield* given; }

async function chunksFrom(...given) {
  const seen = [];
  for await (const chunks of chunksOf(texts(...given))) seen.push(...chunks);
  return seen;
}

test("a stream may be cut anywhere", async () => {
  const whole = 'data: {"a":"x\\n\\ny"}\n\ndata: {"a":2}\n\ndata: [DONE]\n\n';
  for (let at = 0; at <= whole.length; at += 1) {
    const seen = await chunksFrom(whole.slice(0, at), whole.slice(at));
    assert.deepEqual(seen, [{ a: "x\n\ny" }, { a: 2 }]);
  }
});

test("what came together is told together", async () => {
  const [given, seen] = [['data: {"a":1}\n\ndata: {"a":2}\n\nda', "ta: {}\n\ndata: [DONE]\n\n"], []];
  for await (const chunks of chunksOf(texts(...given))) seen.push(chunks);
  assert.deepEqual(seen, [[{ a: 1 }, { a: 2 }], [{}]]);
});

test("a stream without an end, and one with an error, are no answers", async () => {
  await assert.rejects(chunksFrom('data: {"a":1}\n\n'), /before its end/);
  await assert.rejects(chunksFrom('data: {"error":{"message":"lost"}}\n\n'), /^Error: lost$/);
});

test("the rate leaves out what the prompt took", () => {
  const tally = new Tally();
  assert.equal(tally.rate, null);
  tally.add("a", 1, 1, 10);
  assert.equal(tally.rate, null);
  tally.add("bc", 3, 2, 10.5);
  tally.add("", 2, 3, 11);
  assert.equal(tally.rate, 5);
  assert.equal(tally.perForward, 2);
  assert.deepEqual(tally.pieces, [{ start: 0, end: 1, tokens: 1, at: 0 },
                                  { start: 1, end: 3, tokens: 3, at: 0.5 }]);
});

test("an answer can be played again as it came", () => {
  const tally = new Tally();
  assert.deepEqual([tally.seconds, tally.lengthAt(1)], [0, 0]);
  tally.add("a", 1, 1, 10);
  tally.add("bc", 3, 2, 10.5);
  tally.add("", 1, 3, 11);
  assert.equal(tally.seconds, 1);
  assert.deepEqual([0, 0.4, 0.5, 9].map((at) => tally.lengthAt(at)), [1, 1, 3, 3]);
});

test("answers that were decoded alike have one mean", () => {
  const means = new Means(), mars = { mode: "verified", threshold: 1, adapter: null, forwards: 10 };
  assert.deepEqual(means.with("m", mars, 20), { answers: 1, perForward: 2 });
  assert.deepEqual(means.with("m", { ...mars, threshold: 0.5 }, 40), { answers: 1, perForward: 4 });
  assert.deepEqual(means.with("m", { ...mars, forwards: 30 }, 20), { answers: 2, perForward: 1 });
});

test("two answers are compared as far as both came", () => {
  const of = (text, rate, isWhole = true) => ({ text, rate, isWhole });
  assert.deepEqual(verdict(of("ab", 30), of("ab", 20)), { times: "1.50", text: "the same text" });
  assert.equal(verdict(of("ab", 30), of("a", 20)).text, "another text");
  assert.equal(verdict(of("ab", 30), of("a", 20, false)).text, "the same text as far as both came");
  assert.equal(verdict(of("ab", 30), of("b", 20, false)).text, "another text");
  assert.equal(verdict(of("ab", 30), of("", null, false)), null);
  // All of it came in one event, which has no speed.
  assert.deepEqual(verdict(of("ab", 30), of("ab", null)), { times: null, text: "the same text" });
});

test("numbers are short", () => {
  assert.equal(modeName({ mode: "verified", threshold: 0.30000001 }), "verified at 0.3");
  assert.equal(modeName({ mode: "exact", threshold: null }), "exact");
  assert.deepEqual([speed(null), speed(3.21), speed(9.7), speed(123.4)], ["–", "3.2", "10", "123"]);
});
