// OpenAI's own client for JavaScript. The argument is the address of a server whose model answers as tests/test_clients.py says.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Who are you, and where do you live?" }];

const whole = await client.chat.completions.create({ model, messages });
assert.equal(whole.choices[0].message.content.trim(), "I am a heron.");
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);

const stream = await client.chat.completions.create({
  model,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
let text = "";
let usage = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text.trim(), "I live by the lake.");
assert.ok(usage.completion_tokens > 0);

const towns = [];
const runner = client.chat.completions.runTools({
  model,
  messages: [{ role: "user", content: "How is the weather in Lindau?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather in a town",
        parameters: { type: "object", properties: { town: { type: "string" } }, required: ["town"] },
        parse: JSON.parse,
        function: ({ town }) => {
          towns.push(town);
          return "sunny";
        },
      },
    },
  ],
});
assert.equal((await runner.finalContent()).trim(), "It is sunny in Lindau.");
assert.deepEqual(towns, ["Lindau"]);

const Bird = z.object({ name: z.string(), legs: z.number().int() });
const parsed = await client.chat.completions.parse({
  model,
  messages: [{ role: "user", content: "A bird as JSON" }],
  response_format: zodResponseFormat(Bird, "bird"),
});
assert.deepEqual(parsed.choices[0].message.parsed, { name: "heron", legs: 2 });

const response = await client.responses.create({ model, input: "Say hello." });
assert.equal(response.output_text.trim(), "Hello.");
const next = client.responses.stream({ model, input: "Again.", previous_response_id: response.id });
assert.equal((await next.finalResponse()).output_text.trim(), "Hello again.");
assert.equal((await client.responses.retrieve(response.id)).output_text.trim(), "Hello.");

const { data } = await client.embeddings.create({ model, input: ["a heron", "a lake"] });
assert.equal(data.length, 2);
assert.ok(Math.abs(data[0].embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-3);

await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);

const aborted = await client.chat.completions.create({ model, messages, stream: true });
aborted.controller.abort();
for await (const _ of aborted) {
  assert.fail("the stream goes on after it was aborted");
}
console.log("ok");
