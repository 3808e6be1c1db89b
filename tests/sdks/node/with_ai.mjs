// Vercel's AI SDK, `ai` with `@ai-sdk/openai` and `@ai-sdk/anthropic`, through all doors.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { openai } from "@ai-sdk/openai";
import { Output, embed, embedMany, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import { CHAT, EMBEDDER, MESSAGES, QUESTION, RESPONSES, each, run } from "./checks.mjs";

// Its base URL ends in `/v1`; that of Anthropic's own SDK, which reads the same variable, doesn't.
const anthropic = createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` });
const schema = z.object({ name: z.string(), knots: z.number() });
const prompt = QUESTION;

const checks = (of, writers, smalls) => ({
  ...each(writers, {
    async "`generateText`"(model) {
      const answer = await generateText({ model, prompt });
      assert(answer.text.includes(QUESTION) && answer.usage.totalTokens > 0 && answer.finishReason === "stop");
    },
    async "`streamText`"(model) {
      const pieces = [];
      const streamed = streamText({ model, prompt });
      for await (const piece of streamed.textStream) pieces.push(piece);
      assert(pieces.join("").includes(QUESTION) && (await streamed.usage).totalTokens > 0);
    },
    async "tools and their results, streamed and not"(model) {
      const found = [];
      const inputSchema = z.object({ name: z.string() });
      const execute = ({ name }) => found.push(name) && "at sea";
      const tools = { find_ship: tool({ inputSchema, execute }) };
      const steps = await generateText({ model, prompt, tools, stopWhen: isStepCount(2) });
      const streamed = streamText({ model, prompt, tools, stopWhen: isStepCount(2) });
      await streamed.consumeStream();
      assert.deepEqual(found, ["ferry", "ferry"]);
      assert.deepEqual([steps.finishReason, await streamed.finishReason], ["stop", "stop"]);
    },
  }),
  ...each(smalls, {
    async "`Output.object`, streamed and not"(model) {
      const output = Output.object({ schema });
      schema.parse((await generateText({ model, prompt, output })).output);
      const streamed = streamText({ model, prompt, output });
      for await (const _ of streamed.partialOutputStream);
      schema.parse(await streamed.output);
    },
  }),
  async errors() {
    await assert.rejects(generateText({ model: of("no-such"), prompt }), { statusCode: 404 });
  },
});

const models = (of, size, ...pairs) => pairs.map((pair) => of(pair[size]));
for (const [door, of, ...pairs] of [
  ["chat", openai.chat, CHAT, MESSAGES],
  ["Responses", openai, RESPONSES, CHAT, MESSAGES],
  ["Messages", anthropic, MESSAGES, CHAT, RESPONSES],
])
  await run(door, checks(of, models(of, "writer", ...pairs), models(of, "small", ...pairs)));

await run("embeddings", {
  async "`embed`, `embedMany`"() {
    const model = openai.embedding(EMBEDDER);
    const { embedding, usage } = await embed({ model, value: QUESTION });
    const { embeddings } = await embedMany({ model, values: [QUESTION, "the quay"] });
    assert(embeddings.length === 2 && usage.tokens > 0);
    assert.deepEqual(embeddings[0], embedding);
  },
});
