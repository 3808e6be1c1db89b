// What the programs of this folder share: see ../checks.py.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { setTimeout } from "node:timers/promises";

export const QUESTION = "Where is the ferry?";
export const EMBEDDER = "text-embedding-3-small";

// Pairs of models by the API that their provider speaks. A call through another door is translated.
export const CHAT = { writer: "gpt-4o", small: "gpt-4o-mini" };
export const RESPONSES = { writer: "gpt-5", small: "gpt-5-mini" };
export const MESSAGES = { writer: "claude-opus-4-5", small: "claude-haiku-4-5" };
export const KINDS = [
  "openai",
  "openai-responses",
  "anthropic",
  "azure",
  "azure-v1",
  "bedrock",
  "bedrock-claude",
  "gemini",
  "vertex",
  "vertex-claude",
].map((kind) => ({ writer: `ship-${kind}`, small: `ship-${kind}` }));
export const ANSWER = "The ferry is at sea.";
export const SLOW = "gpt-slow"; // takes 20 s

// Headers of a call of a new task with a rate limit, beyond which calls are refused.
export const limitedTask = (rule) => ({
  "x-breakwater-task-id": randomUUID(),
  "x-breakwater-rate-limit": JSON.stringify({ ...rule, on_exceeded: "fail" }),
});

// The header of a task, by whose name the records of a conversation are found.
export const taskOf = (model, sdk, door, streamed) => ({
  "x-breakwater-task-id": `${sdk.replace("/", "-")}/${door}/${model}/${streamed ? "streamed" : "whole"}`,
});

// The thought that comes with the tool call: some APIs show none.
export const thoughtOf = (model, door) =>
  ["ship-azure", "ship-vertex"].includes(model) || (model === "ship-azure-v1" && door !== "Responses")
    ? ""
    : "A ship; look it up.";

// Fails unless the SDK retries a refused call once, at the time that the refusal names, and is refused again. `create`
// takes a model and an SDK's options for the call.
export async function checkBackoff(create, RateLimitError) {
  const headers = limitedTask({ concurrent_calls: 1 });
  const leaving = new AbortController();
  const slow = create(SLOW, { headers, signal: leaving.signal }).catch(() => {});
  const refusal = async (maxRetries) => {
    for (let tries = 0; tries < 10; tries++) {
      await setTimeout(1000); // the other call must come first
      try {
        await create(CHAT.small, { headers, maxRetries });
      } catch (error) {
        assert(error instanceof RateLimitError, error.message);
        return Number(error.headers.get("retry-after-ms"));
      }
    }
    throw new Error("no call was refused");
  };
  const waitMs = await refusal(0);
  const began = performance.now();
  await refusal(1);
  const tookMs = performance.now() - began - 1000;
  leaving.abort();
  await slow;
  assert(waitMs <= tookMs && tookMs < waitMs + 3000, `told to wait ${waitMs} ms, it took ${tookMs} ms`);
}

// Runs the checks of a door, and prints of each a line of JSON.
export async function run(door, checks) {
  for (const [what, check] of Object.entries(checks)) {
    let error = null;
    try {
      await check();
    } catch (failed) {
      error = `${failed.name}: ${failed.message}`;
    }
    console.log(JSON.stringify({ what, door, error }));
  }
}

// Checks that run with each of some models; an error names the models.
export const each = (models, checks) =>
  Object.fromEntries(
    Object.entries(checks).map(([what, check]) => [
      what,
      async () => {
        const failed = [];
        for (const one of models)
          await check(one).catch(({ name, message }) => failed.push(`${one.writer ?? one.modelId}: ${name}: ${message}`));
        if (failed.length) throw new Error(failed.join("; "));
      },
    ]),
  );
