// `openai` with a model of each kind of provider: tools and thinking, whole and streamed.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { ANSWER, KINDS, QUESTION, each, run, taskOf, thoughtOf } from "./checks.mjs";

const openai = new OpenAI();
const parameters = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
const asked = { role: "user", content: QUESTION };

const converse = async (model, streamed) => {
  const headers = taskOf(model, "openai (Node.js)", "chat", streamed);
  const ask = async (messages) => {
    const tools = [{ type: "function", function: { name: "find_ship", parameters } }];
    const body = { model, messages, tools, reasoning_effort: "low" };
    // Claude thinks where its own param says so.
    if (/claude|anthropic/.test(model)) Object.assign(body, { thinking: { type: "enabled", budget_tokens: 1024 }, max_tokens: 2000 });
    if (!streamed) return openai.chat.completions.create(body, { headers });
    const stream = openai.chat.completions.stream({ ...body, stream_options: { include_usage: true } }, { headers });
    let thought = "";
    for await (const { choices } of stream) thought += choices[0]?.delta.reasoning_content ?? "";
    const completion = await stream.finalChatCompletion();
    if (thought) completion.choices[0].message.reasoning_content = thought; // it keeps the last piece alone
    return completion;
  };
  const first = await ask([asked]);
  const { message } = first.choices[0];
  assert.equal(message.reasoning_content ?? "", thoughtOf(model, "chat"));
  const [{ id, type, function: called, ...more }] = message.tool_calls;
  assert.deepEqual(JSON.parse(called.arguments), { name: "ferry" });
  const call = { id, type, function: { name: called.name, arguments: called.arguments }, ...more };
  delete call.index;
  const said = { role: "assistant", content: message.content, tool_calls: [call] };
  if (message.thinking_blocks) said.thinking_blocks = message.thinking_blocks;
  if (message.extra_content) said.extra_content = message.extra_content;
  const second = await ask([asked, said, { role: "tool", tool_call_id: id, content: "at sea" }]);
  assert.equal(second.choices[0].message.content, ANSWER);
  for (const { usage } of [first, second])
    assert.deepEqual([usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens], [1220, 9, 1000]);
};

const respond = async (model, streamed) => {
  const headers = taskOf(model, "openai (Node.js)", "Responses", streamed);
  const ask = async (input) => {
    const tools = [{ type: "function", name: "find_ship", parameters, strict: false }];
    const reasoning = { effort: "low", summary: "auto" };
    const body = { model, input, tools, reasoning, store: false, include: ["reasoning.encrypted_content"] };
    if (!streamed) return openai.responses.create(body, { headers });
    return openai.responses.stream(body, { headers }).finalResponse();
  };
  const first = await ask([asked]);
  const thoughts = first.output.filter(({ type }) => type === "reasoning");
  const texts = thoughts.map(({ summary, content }) => [...summary, ...(content ?? [])].map(({ text }) => text).join(""));
  assert.equal(texts.join(""), thoughtOf(model, "Responses"));
  const call = first.output.find(({ type }) => type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { name: "ferry" });
  const output = first.output.map(({ parsed_arguments: _, ...item }) => item);
  const second = await ask([asked, ...output, { type: "function_call_output", call_id: call.call_id, output: "at sea" }]);
  assert.equal(second.output_text, ANSWER);
};

for (const [door, talk] of [
  ["chat", converse],
  ["Responses", respond],
])
  await run(door, {
    ...each(KINDS, {
      async "each kind of provider: tools and thinking"({ writer: model }) {
        await talk(model, false);
      },
      async "each kind of provider: streamed tools and thinking"({ writer: model }) {
        await talk(model, true);
      },
    }),
  });
