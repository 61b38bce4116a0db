// The service that this page came from: what it is asked, and its stream of answers.

export class NeedsKey extends Error {}

// An answer that was refused before its first word.
export class Refused extends Error {}

export class Service {
  key = "";

  get #headers() {
    return { "Content-Type": "application/json",
             ...(this.key && { Authorization: `Bearer ${this.key}` }) };
  }

  // The `data` of a list.
  async list(path) {
    const reply = await fetch(path, { headers: this.#headers });
    if (reply.status === 401) throw new NeedsKey("needs a valid API key");
    if (!reply.ok) throw new Error(await wordsOf(reply));
    return (await reply.json()).data;
  }

  // The chunks of an answer, those together that came together.
  async *answer(request, signal) {
    const body = JSON.stringify({ ...request, stream: true, return_forwards: true,
                                  stream_options: { include_usage: true } });
    let reply;
    try {
      reply = await fetch("v1/chat/completions",
                          { method: "POST", headers: this.#headers, body, signal });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Refused("the service cannot be reached");
    }
    if (!reply.ok) throw new Refused(await wordsOf(reply));
    yield* chunksOf(texts(reply.body));
  }
}

// The reader is there in every browser, an iterable stream is not.
async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

// A proxy's error may be anything.
async function wordsOf(reply) {
  const said = await reply.json().catch(() => null);
  return said?.error?.message ?? `the service answered with status ${reply.status}`;
}

// The chunks of server-sent events that come in texts cut anywhere: with each text, those that it
// completes.
export async function* chunksOf(texts) {
  let held = "";
  for await (const text of texts) {
    const events = (held + text).split("\n\n");
    held = events.pop();
    const chunks = [];
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") {
        yield chunks;
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) {
        yield chunks;
        throw new Error(chunk.error.message);
      }
      chunks.push(chunk);
    }
    yield chunks;
  }
  throw new Error("the service ended the answer before its end");
}
