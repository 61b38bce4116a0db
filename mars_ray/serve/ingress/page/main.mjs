// The conversation: what is asked, in which order, and what becomes of it.
import { Answer } from "./answer.mjs";
import { button, byId, copyButton, element } from "./elements.mjs";
import { replayButton } from "./replay.mjs";
import { Service } from "./service.mjs";
import { chosen, isBeside, prepareSettings } from "./settings.mjs";
import { Status } from "./status.mjs";
import { modeName, speed, verdict } from "./tally.mjs";

const SEEDS = 2 ** 31;
const NEAR = 200; // pixels from the end of the page
const service = new Service();
let messages = [];
let abort = null; // while an answer comes

function article(kind, who, ...children) {
  const made = element("article", kind, element("h2", "", who), ...children);
  byId("talk").append(made);
  return made;
}

// Changes the page. Who reads its end still does afterwards; others are left where they are.
function inView(change) {
  const page = document.documentElement;
  const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR;
  change();
  if (isAtEnd) page.scrollTop = page.scrollHeight;
}

// One answer at a time: two would share the processor, and be slower than either.
async function alone(work) {
  abort = new AbortController();
  setBusy(true);
  await work(abort.signal);
  abort = null;
  inView(() => setBusy(false));
  byId("text").focus();
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  for (const compare of document.querySelectorAll(".compare")) compare.disabled = isBusy;
  // Read out when it is complete, not word by word.
  byId("talk").setAttribute("aria-busy", String(isBusy));
}

function problem(words) {
  byId("problem").textContent = words;
  byId("problem").hidden = !words;
}

async function ask(text, signal) {
  problem("");
  byId("welcome").hidden = true;
  const asked = article("you", "You", element("p", "", text), copyButton("the question", () => text));
  const model = byId("model").value, said = { role: "user", content: text };
  const before = messages;
  const request = { model, seed: Math.floor(Math.random() * SEEDS), ...chosen([...before, said]) };
  const ours = new Answer("ours");
  const sides = element("div", "sides", ours.section);
  const box = article("them", model, sides);
  const wantsExact = isBeside() && request.mode !== "exact";
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
  await ours.ask(service, request, signal, inView);
  if (before !== messages) return; // a new chat has begun
  if (ours.refused !== null) {
    asked.remove();
    box.remove();
    putBack(text, ours.refused);
    return;
  }
  if (!ours.tally.text && !ours.usage) return;
  messages.push(said, { role: "assistant", content: ours.tally.text });
  if (!ours.usage || ours.usage.mars.mode === "exact") return;
  const shown = { box, sides, ours, request };
  if (wantsExact) await compare(shown, signal); else offer(shown);
}

// A refused question is not lost, and not part of the conversation.
function putBack(text, why) {
  const box = byId("text");
  box.value = box.value ? `${text}\n${box.value}` : text;
  byId("welcome").hidden = messages.length > 0;
  problem(why);
}

// A button that has the question answered again, one token a forward.
function offer(shown) {
  shown.box.append(button("Ask again in exact mode", "compare", (made) => {
    if (abort) return;
    made.remove();
    alone((signal) => compare(shown, signal));
  }));
}

async function compare({ box, sides, ours, request }, signal) {
  const exact = new Answer("exact");
  ours.title.textContent = modeName(ours.usage.mars);
  exact.title.textContent = "exact";
  sides.append(exact.section);
  box.classList.add("two");
  const { threshold: _, ...rest } = request;
  await exact.ask(service, { ...rest, mode: "exact" }, signal, inView);
  const compared = verdict(ours.outcome, exact.outcome);
  if (compared === null) return;
  const both = [ours, exact];
  for (const each of both) each.rate.textContent = `${speed(each.tally.rate)} tokens/s`;
  if (compared.times === null) {
    box.append(element("p", "verdict", `exact gives ${compared.text}`));
    return;
  }
  const most = Math.max(ours.tally.rate, exact.tally.rate);
  for (const each of both) each.bar.style.width = `${100 * each.tally.rate / most}%`;
  box.append(element("p", "verdict", element("b", "", compared.times),
                     ` times the tokens per second of exact, ${compared.text} `,
                     replayButton(both)));
}

function send(text) {
  if (!text || abort || !byId("model").value) return false;
  alone((signal) => ask(text, signal));
  return true;
}

function newChat() {
  abort?.abort();
  messages = []; // an answer on its way has the old ones
  byId("talk").replaceChildren();
  byId("welcome").hidden = false;
  problem("");
  byId("text").focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (send(byId("text").value.trim())) byId("text").value = "";
});
byId("text").addEventListener("keydown", (event) => {
  // Enter chooses a word while one is composed; 229 is how some browsers say so.
  if (event.isComposing || event.keyCode === 229) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) abort?.abort();
});
byId("stop").addEventListener("click", () => abort?.abort());
byId("new").addEventListener("click", newChat);
for (const example of byId("examples").querySelectorAll("button")) {
  example.addEventListener("click", () => send(example.textContent.replace(/\s+/g, " ").trim()));
}
prepareSettings();
new Status(service).connect();
