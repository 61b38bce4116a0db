// Markdown as a tree of plain objects, `{ tag, children, ... }` and `{ text, start }`, where `start`
// is the text's place in the source, or null where it was not found. Nothing here makes HTML: what
// the parser takes for HTML is text like any other, and there are no tags but those written below.
import { lexer } from "./marked.mjs";

// The parser needs quadratic time for a paragraph: what is longer is shown as it is.
const LONGEST = 50_000;
const SAFE = /^(https?:\/\/|mailto:)/i;
const HEADINGS = ["h3", "h4", "h5", "h6", "h6", "h6"]; // below the name of who speaks, an h2

// The blocks of a text; `raw` is what a block was made of.
export function blocksOf(source) {
  try {
    if (source.length > LONGEST) throw new RangeError("too long");
    const leaf = finder(source);
    return lexer(source).filter((token) => token.type !== "space")
      .map((token) => ({ raw: token.raw, ...block(token, leaf) }));
  } catch {
    // Thousands of quotes within each other, say.
    return [{ raw: source, tag: "p", children: [{ text: source, start: 0 }] }];
  }
}

// Makes leaves, in the order of the source: each is looked for behind the one before. Line by line,
// as the lines of a quote or a list have something of their own in between.
function finder(source) {
  let behind = 0;
  const one = (text) => {
    const start = source.indexOf(text, behind);
    if (start < 0) return { text, start: null };
    behind = start + text.length;
    return { text, start };
  };
  return (text) => text.split(/(?<=\n)/).map(one);
}

function block(token, leaf) {
  const inline = () => inlines(token.tokens, leaf);
  const blocks = (tokens) => tokens.filter(({ type }) => type !== "space")
    .map((inner) => block(inner, leaf));
  switch (token.type) {
    case "code":
      return { tag: "pre", language: token.lang ?? "",
               children: [{ tag: "code", children: leaf(token.text) }] };
    case "heading":
      return { tag: HEADINGS[token.depth - 1], children: inline() };
    case "paragraph":
      return { tag: "p", children: inline() };
    case "text":
      // Of a list item: its text, or a part of it.
      return { tag: "span", children: token.tokens ? inline() : leaf(token.text) };
    case "checkbox":
      return { tag: "span", children: [{ text: token.checked ? "☑ " : "☐ ", start: null }] };
    case "blockquote":
      return { tag: "blockquote", children: blocks(token.tokens) };
    case "hr":
      return { tag: "hr", children: [] };
    case "list": {
      const children = token.items.map((item) => ({ tag: "li", children: blocks(item.tokens) }));
      return token.ordered ? { tag: "ol", first: token.start || 1, children } : { tag: "ul", children };
    }
    case "table":
      return { tag: "table", children: [token.header, ...token.rows].map((row, number) => ({
        tag: "tr",
        children: row.map((cell) => ({
          tag: number ? "td" : "th", children: inlines(cell.tokens, leaf) })) })) };
    default:
      // HTML, the addresses of links, and whatever the parser learns one day.
      return { tag: "p", children: leaf(token.raw.trimEnd()) };
  }
}

const SPANS = { strong: "strong", em: "em", del: "del" };

function inlines(tokens, leaf) {
  return tokens.flatMap((token) => {
    if (token.type in SPANS) return { tag: SPANS[token.type], children: inlines(token.tokens, leaf) };
    switch (token.type) {
      case "text":
        return token.tokens ? inlines(token.tokens, leaf) : leaf(token.text);
      case "escape":
        return leaf(token.text);
      case "codespan":
        return { tag: "code", children: leaf(token.text) };
      case "br":
        return { text: "\n", start: null };
      case "link":
        if (!SAFE.test(token.href)) return leaf(token.raw);
        return { tag: "a", href: token.href, children: inlines(token.tokens, leaf) };
      case "image":
        // Never fetched: whoever serves it would learn who reads the answer.
        if (!SAFE.test(token.href)) return leaf(token.raw);
        return { tag: "a", href: token.href, children: leaf(token.text || token.href) };
      default:
        return leaf(token.raw);
    }
  });
}
