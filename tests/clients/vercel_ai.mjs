// Vercel's AI SDK with its client for servers that are compatible with OpenAI's API. The argument is the address of a server whose
// model answers as tests/test_clients.py says.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "halo",
  baseURL: `${process.argv[2]}/v1`,
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const model = provider("any");

const whole = await generateText({ model, prompt: "Who are you, and where do you live?", maxRetries: 0 });
assert.equal(whole.text.trim(), "I am a heron.");
assert.ok(whole.usage.outputTokens > 0);

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
const called = await generateText({
  model,
  prompt: "How is the weather in Lindau?",
  tools,
  stopWhen: stepCountIs(3),
  maxRetries: 0,
});
assert.equal(called.text.trim(), "It is sunny in Lindau.");
assert.deepEqual(towns, ["Lindau"]);

const streamed = streamText({ model, prompt: "And today in Lindau?", tools, stopWhen: stepCountIs(3), maxRetries: 0 });
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

const { embeddings } = await embedMany({
  model: provider.embeddingModel("any"),
  values: ["a heron", "a lake"],
  maxRetries: 0,
});
assert.equal(embeddings.length, 2);

const controller = new AbortController();
controller.abort();
await assert.rejects(
  generateText({ model, prompt: "Wait", abortSignal: controller.signal, maxRetries: 0 }),
  (error) => error.name === "AbortError",
);
console.log("ok");
