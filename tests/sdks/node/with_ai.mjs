// Vercel's AI SDK, `ai` with `@ai-sdk/openai`. It takes its base URL and key from the environment.

import assert from "node:assert/strict";
import { openai } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { QUESTION, SMALL, WRITER, run } from "./checks.mjs";

const [writer, small] = [openai.chat(WRITER), openai.chat(SMALL)];
const schema = z.object({ name: z.string(), knots: z.number() });
const prompt = QUESTION;

await run({
  async "`generateText`"() {
    const answer = await generateText({ model: writer, prompt });
    assert(answer.text.includes(QUESTION) && answer.usage.totalTokens > 0);
  },
  async "`streamText`"() {
    const pieces = [];
    for await (const piece of streamText({ model: writer, prompt }).textStream) pieces.push(piece);
    assert(pieces.join("").includes(QUESTION) && pieces.length > 3);
  },
  async "tools and their results, streamed and not"() {
    const found = [];
    const inputSchema = z.object({ name: z.string() });
    const execute = ({ name }) => found.push(name) && "at sea";
    const tools = { find_ship: tool({ inputSchema, execute }) };
    const steps = await generateText({ model: writer, prompt, tools, stopWhen: stepCountIs(2) });
    const streamed = streamText({ model: writer, prompt, tools, stopWhen: stepCountIs(2) });
    await streamed.consumeStream();
    assert.deepEqual(found, ["ferry", "ferry"]);
    assert.deepEqual([steps.finishReason, await streamed.finishReason], ["stop", "stop"]);
  },
  async "`generateObject`, `streamObject`"() {
    schema.parse((await generateObject({ model: small, prompt, schema })).object);
    const streamed = streamObject({ model: small, prompt, schema });
    for await (const _ of streamed.partialObjectStream);
    schema.parse(await streamed.object);
  },
  async errors() {
    await assert.rejects(generateText({ model: openai.chat("no-such"), prompt }), { statusCode: 404 });
  },
});
