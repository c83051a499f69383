// Vercel's AI SDK with a model that was trained to call functions: it decides itself that it calls one, and uses the result.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const compatible = createOpenAICompatible({ name: "halo", baseURL });
const responses = createOpenAI({ baseURL, apiKey: "none" });

for (const model of [compatible("any"), responses("any")]) {
  const towns = [];
  const get_weather = tool({
    description: "The weather in a town",
    inputSchema: z.object({ town: z.string() }),
    execute: async ({ town }) => {
      towns.push(town);
      return "hail, 3 degrees";
    },
  });
  const answer = await generateText({
    model,
    prompt: "What is the weather in Lindau?",
    tools: { get_weather },
    // The model is too small to stop calling by itself.
    prepareStep: ({ stepNumber }) => (stepNumber === 0 ? {} : { toolChoice: "none" }),
    stopWhen: stepCountIs(3),
    temperature: 0,
    maxRetries: 0,
  });
  assert.ok(towns.length > 0 && towns.every((town) => town === "Lindau"), towns.join());
  assert.match(answer.text.toLowerCase(), /hail/);
}
console.log("ok");
