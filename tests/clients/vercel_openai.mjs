// Vercel's AI SDK with its client of OpenAI itself, which uses the Responses API. The argument is the address of a server whose model
// answers as tests/test_clients.py says.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
const model = openai("any");

const whole = await generateText({ model, prompt: "Who are you, and where do you live?", maxRetries: 0 });
assert.equal(whole.text.trim(), "I am a heron.");
assert.ok(whole.usage.outputTokens > 0);
assert.match(whole.response.id, /^resp_/);

const stream = streamText({ model, prompt: "And where is that?", maxRetries: 0 });
let text = "";
for await (const part of stream.textStream) {
  text += part;
}
assert.equal(text.trim(), "I live by the lake.");
assert.equal(await stream.finishReason, "stop");

const towns = [];
const tools = {
  get_weather: tool({
    description: "The weather in a town",
    inputSchema: z.object({ town: z.string() }),
    execute: async ({ town }) => {
      towns.push(town);
      return "sunny";
    },
  }),
};
const options = { model, tools, stopWhen: stepCountIs(3), maxRetries: 0 };
const called = await generateText({ prompt: "How is the weather in Lindau?", ...options });
assert.equal(called.text.trim(), "It is sunny in Lindau.");
const streamed = streamText({ prompt: "And today in Lindau?", ...options });
await streamed.consumeStream();
assert.equal((await streamed.text).trim(), "It is sunny in Lindau.");
assert.deepEqual(towns, ["Lindau", "Lindau"]);

const { object } = await generateObject({
  model,
  schema: z.object({ name: z.string(), legs: z.number().int() }),
  prompt: "A bird as JSON",
  maxRetries: 0,
});
assert.deepEqual(object, { name: "heron", legs: 2 });

const stateless = await generateText({
  model,
  prompt: "Hello",
  providerOptions: { openai: { store: false, metadata: { project: "lake" }, reasoningEffort: "low" } },
  maxRetries: 0,
});
assert.equal(stateless.text.trim(), "Hello.");

const chat = await generateText({ model: openai.chat("any"), prompt: "Hello there", maxRetries: 0 });
assert.equal(chat.text.trim(), "Hello again.");
console.log("ok");
