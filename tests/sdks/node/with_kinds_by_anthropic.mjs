// `@anthropic-ai/sdk` with a model of each kind of provider: tools and thinking, whole and streamed.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { ANSWER, KINDS, QUESTION, each, run, taskOf, thoughtOf } from "./checks.mjs";

const { messages } = new Anthropic();
const input_schema = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
const asked = { role: "user", content: QUESTION };

const converse = async (model, streamed) => {
  const headers = taskOf(model, "@anthropic-ai/sdk", "Messages", streamed);
  const ask = async (turns) => {
    const tools = [{ name: "find_ship", input_schema }];
    const thinking = { type: "enabled", budget_tokens: 1024 };
    const body = { model, max_tokens: 2000, messages: turns, tools, thinking };
    return streamed ? messages.stream(body, { headers }).finalMessage() : messages.create(body, { headers });
  };
  const first = await ask([asked]);
  assert.equal(first.stop_reason, "tool_use");
  const thoughts = first.content.filter(({ type }) => type === "thinking").map(({ thinking }) => thinking);
  assert.equal(thoughts.join(""), thoughtOf(model, "Messages"));
  const call = first.content.at(-1);
  assert.deepEqual([call.name, call.input], ["find_ship", { name: "ferry" }]);
  const result = { type: "tool_result", tool_use_id: call.id, content: "at sea" };
  const second = await ask([asked, { role: "assistant", content: first.content }, { role: "user", content: [result] }]);
  assert.deepEqual([second.content.at(-1).text, second.stop_reason], [ANSWER, "end_turn"]);
  for (const { usage } of [first, second]) {
    const written = usage.cache_creation_input_tokens ?? 0;
    assert.deepEqual([usage.input_tokens + written, usage.cache_read_input_tokens, usage.output_tokens], [220, 1000, 9]);
  }
};

await run("Messages", {
  ...each(KINDS, {
    async "each kind of provider: tools and thinking"({ writer: model }) {
      await converse(model, false);
    },
    async "each kind of provider: streamed tools and thinking"({ writer: model }) {
      await converse(model, true);
    },
  }),
});
