// What the service is doing, asked every few seconds while somebody looks.
import { byId } from "./elements.mjs";
import { NeedsKey } from "./service.mjs";

const POLL_MS = 2000;

export class Status {
  #service;
  #isRefused = false; // by the key; asked again with another one

  constructor(service) {
    this.#service = service;
    byId("key").addEventListener("change", () => {
      service.key = byId("key").value;
      this.connect();
    });
    byId("model").addEventListener("change", () => this.#poll());
    document.addEventListener("visibilitychange", () => this.#poll());
    setInterval(() => this.#poll(), POLL_MS);
  }

  // Learns the models' names.
  async connect() {
    this.#isRefused = false;
    try {
      const names = (await this.#service.list("v1/models")).map((model) => model.id);
      byId("model").replaceChildren(...names.map((name) => new Option(name)));
      byId("model-label").hidden = false;
      say("");
    } catch (error) {
      this.#failed(error);
    }
    await this.#poll();
  }

  async #poll() {
    const model = byId("model").value;
    if (!model || this.#isRefused || document.visibilityState !== "visible") return;
    try {
      const entries = await this.#service.list("v1/mars/status");
      show(entries.find((status) => status.id === model));
      say("");
    } catch (error) {
      byId("figures").hidden = byId("policy").hidden = true;
      this.#failed(error);
    }
  }

  #failed(error) {
    if (error instanceof NeedsKey) {
      this.#isRefused = true;
      byId("key-label").hidden = false;
    }
    // A browser's own words for this differ, and say little.
    say(error instanceof TypeError ? "the service cannot be reached" : error.message);
  }
}

// What is said twice would be read out twice, and lose what is selected.
function put(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

const say = (text) => put("service", text);
const digits = (number, count) => (number === null ? "–" : number.toFixed(count));
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(0)}%`);

function show(entry) {
  for (const name of ["replicas", "running", "waiting"]) put(name, String(entry[name]));
  put("rate", digits(entry.tokens_per_second, 0));
  put("per-forward", digits(entry.tokens_per_forward, 2));
  put("ngram-share", percent(entry.ngram_share));
  put("in-force", digits(entry.threshold, 2));
  put("adapter", entry.adapter ?? "");
  byId("adapted").hidden = entry.adapter === null;
  byId("policy").hidden = entry.policy === null;
  if (entry.policy) {
    const { replicas, threshold, reason } = entry.policy;
    const wanted = replicas === 1 ? "1 replica" : `${replicas} replicas`;
    put("wanted", `${wanted}, threshold ${digits(threshold, 2)}`);
    put("why", reason);
  }
  byId("mode").options[0].textContent = `service's own (${entry.mode ?? "unknown"})`;
  byId("figures").hidden = false;
}
