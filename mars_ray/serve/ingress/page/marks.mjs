// Which tokens came together: the pieces of an answer, and a text cut where they end.

// The parts of a text that begins at `start`: `{ text, tokens }`, with the number of tokens that came
// of the same forward, and null for text that is of none of the pieces `{ start, end, tokens }`.
export function cut(text, start, pieces) {
  if (start === null) return [{ text, tokens: null }];
  const parts = [], end = start + text.length;
  let at = start;
  for (let number = firstBehind(pieces, start); number < pieces.length && at < end; number += 1) {
    const piece = pieces[number], until = Math.min(piece.end, end);
    if (until > at) parts.push({ text: text.slice(at - start, until - start), tokens: piece.tokens });
    at = Math.max(at, until);
  }
  if (at < end) parts.push({ text: text.slice(at - start), tokens: null });
  return parts;
}

// The first piece that ends behind a place; pieces are in order and touch each other.
function firstBehind(pieces, place) {
  let low = 0, high = pieces.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pieces[middle].end > place) high = middle; else low = middle + 1;
  }
  return low;
}
