// What the official Node client gets of a service, as one JSON object: node client.mjs URL STOP
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "count from one to ten" }];
const greedy = { model: "tiny", messages, max_tokens: 24, temperature: 0, mode: "exact" };
const told = {};

const whole = await client.chat.completions.create({ ...greedy, logprobs: true, n: 2 });
told.whole = whole.choices.map((choice) => choice.message.content);
told.logprobs = whole.choices[1].logprobs.content.length;
told.mars = whole.usage.mars;

told.streamed = "";
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...greedy, ...options })) {
  told.streamed += chunk.choices[0]?.delta.content ?? "";
  told.usage = chunk.usage;
}

const stopped = client.chat.completions.stream({ ...greedy, stop: process.argv[3] });
told.stopped = (await stopped.finalChatCompletion()).choices[0].message.content;

const completion = await client.completions.create({
  model: "tiny", prompt: ["one", "two"], max_tokens: 4, temperature: 0,
});
told.completions = completion.choices.length;

// Random weights would never end a free text, nor the white space between two keys.
const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] } },
  required: ["colour"],
  additionalProperties: false,
  "x-guidance": { whitespace_flexible: false },
};
const parsed = await client.chat.completions.parse({
  ...greedy,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "paint", schema, strict: true } },
});
told.parsed = parsed.choices[0].message.parsed;
const calling = {
  ...greedy,
  max_tokens: 200,
  tools: [{ type: "function", function: { name: "paint", parameters: schema, strict: true } }],
  tool_choice: "required",
  parallel_tool_calls: false,
};
const called = await client.chat.completions.create(calling);
told.called = called.choices[0].message.tool_calls[0];
const streamedCall = client.chat.completions.stream(calling);
const { name, arguments: given } = (await streamedCall.finalChatCompletion())
  .choices[0].message.tool_calls[0].function;
told.streamedCall = { name, arguments: given };

told.errors = {};
for (const fields of [{ store: true }, { model: "other" }]) {
  try {
    await client.chat.completions.create({ ...greedy, ...fields });
  } catch (error) {
    told.errors[error.constructor.name] = [error.status, error.param, error.code];
  }
}

const long = { ...greedy, max_tokens: 300, stream: true };
const abandoned = await client.chat.completions.create(long);
for await (const _ of abandoned) break;
const patience = AbortSignal.timeout(20);
told.aborted = await client.chat.completions
  .create({ ...long, stream: false }, { signal: patience })
  .then(() => "answered", (error) => error.constructor.name);

told.models = (await client.models.list()).data.map((model) => model.id);
console.log(JSON.stringify(told));
