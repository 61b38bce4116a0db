// Elements, none of them made from HTML, and what answers are made of.
import { blocksOf } from "./markdown.mjs";
import { cut } from "./marks.mjs";

export const byId = (id) => document.getElementById(id);
const COPIED_MS = 1500;
const DEEPEST = 5; // shade

export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function button(name, className, onClick) {
  const made = element("button", className, name);
  made.type = "button";
  made.addEventListener("click", () => onClick(made));
  return made;
}

// A button that copies what `text` returns; `what` is for those who do not see where it stands.
export function copyButton(what, text) {
  const made = button("Copy", "quiet", async () => {
    made.textContent = await copied(text()) ? "Copied" : "Not allowed";
    setTimeout(() => { made.textContent = "Copy"; }, COPIED_MS);
  });
  made.title = `Copy ${what}`;
  return made;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS only localhost has a clipboard.
    const area = element("textarea", "", text);
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}

// Shows an answer as Markdown, with its pieces marked. Blocks that have stayed the same stay as they
// are, so that what is selected or has the focus outlives the rest of the answer.
export function drawAnswer(target, text, pieces) {
  const blocks = blocksOf(text), shown = target.raws ?? [];
  // The last one may have more pieces by now.
  const most = Math.min(blocks.length, shown.length) - 1;
  let same = 0;
  while (same < most && blocks[same].raw === shown[same]) same += 1;
  while (target.children.length > same) target.lastChild.remove();
  target.append(...blocks.slice(same).map((block) => drawn(block, pieces)));
  target.raws = blocks.map((block) => block.raw);
}

function drawn(node, pieces) {
  if (node.tag === undefined) return marked(node, pieces);
  const made = element(node.tag, "", ...node.children.map((child) => drawn(child, pieces)));
  if (node.tag === "pre") return codeBlock(made, node.language);
  if (node.tag === "table") return scrolling("div", made);
  if (node.tag === "ol") made.start = node.first;
  if (node.tag === "a") {
    made.href = node.href;
    made.target = "_blank";
    made.rel = "noopener noreferrer nofollow";
    made.title = node.href;
  }
  return made;
}

function marked({ text, start }, pieces) {
  const made = document.createDocumentFragment();
  for (const part of cut(text, start, pieces)) {
    if (part.tokens === null) {
      made.append(part.text);
      continue;
    }
    const span = element("span", "", part.text);
    span.dataset.tokens = Math.min(DEEPEST, part.tokens);
    span.title = `${part.tokens} of one forward`;
    made.append(span);
  }
  return made;
}

function codeBlock(pre, language) {
  const caption = element("figcaption", "", element("span", "", language),
                          copyButton("the code", () => pre.textContent));
  pre.tabIndex = 0; // can be scrolled without a mouse
  return element("figure", "", caption, pre);
}

function scrolling(tag, inside) {
  const made = element(tag, "scrolling", inside);
  made.tabIndex = 0;
  return made;
}
