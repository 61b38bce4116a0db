// How the next question is to be answered.
import { byId } from "./elements.mjs";

const WIDE = "(min-width: 44rem) and (min-height: 40rem)";
const WITH_THRESHOLD = ["verified", "confidence"];

export function prepareSettings() {
  for (const id of ["mode", "threshold", "temperature", "beside", "system"]) {
    byId(id).addEventListener("input", show);
  }
  byId("settings").open = matchMedia(WIDE).matches;
  show();
}

export const isBeside = () => byId("beside").checked;

// The fields of a request; the system prompt is the first of its messages.
export function chosen(messages) {
  const mode = byId("mode").value, system = byId("system").value.trim();
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : [...messages],
    temperature: number("temperature"),
    ...(mode && { mode }),
    ...(WITH_THRESHOLD.includes(mode) && { threshold: number("threshold") }),
  };
}

const number = (id) => Number(byId(id).value);

function show() {
  const mode = byId("mode").value, has = WITH_THRESHOLD.includes(mode);
  byId("threshold").disabled = !has;
  byId("threshold-shown").textContent = has ? number("threshold").toFixed(2) : "–";
  byId("temperature-shown").textContent = number("temperature").toFixed(1);
  const parts = [(mode || "service's own mode") + (has ? ` at ${number("threshold")}` : ""),
                 `temperature ${number("temperature")}`];
  if (byId("system").value.trim()) parts.push("a system prompt");
  if (isBeside()) parts.push("exact beside it");
  byId("chosen").textContent = parts.join(", ");
}
