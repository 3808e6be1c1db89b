// `openai` for Node.js: chat completions. It takes its base URL and key from the environment.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { CHAT, QUESTION, checkBackoff, limitedTask, run } from "./checks.mjs";

const chat = new OpenAI().chat.completions;
const messages = [{ role: "user", content: QUESTION }];
const parameters = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
const tools = [{ type: "function", function: { name: "find_ship", parameters } }];
const Ship = z.object({ name: z.string(), knots: z.number() });

await run("chat", {
  async chat() {
    const answer = await chat.create({ model: CHAT.writer, messages });
    assert(answer.choices[0].message.content.includes(QUESTION));
    assert(answer.usage.total_tokens > 0);
  },
  async stream() {
    let text = "", chunks = 0, usage;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await chat.create({ model: CHAT.writer, messages, ...options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      chunks += 1;
      usage = chunk.usage;
    }
    assert(text.includes(QUESTION) && chunks > 3 && usage.total_tokens > 0);
  },
  async "`stream()` helper"() {
    assert((await chat.stream({ model: CHAT.writer, messages }).finalContent()).includes(QUESTION));
  },
  async "tools and their results, by `runTools`"() {
    const found = [];
    const find = { name: "find_ship", parameters, parse: JSON.parse, function: ({ name }) => found.push(name) && "at sea" };
    const runner = chat.runTools({ model: CHAT.writer, messages, tools: [{ type: "function", function: find }] });
    await runner.finalContent();
    assert.deepEqual(found, ["ferry"]);
  },
  async "forced tool"() {
    const asked = await chat.create({ model: CHAT.small, messages, tools, tool_choice: "required" });
    assert.equal(asked.choices[0].message.tool_calls[0].function.name, "find_ship");
  },
  async "streamed tool calls"() {
    const [call] = (await chat.stream({ model: CHAT.writer, messages, tools }).finalMessage()).tool_calls;
    assert.equal(call.function.arguments, '{"name":"ferry"}');
  },
  async "parsed outputs"() {
    const answer = await chat.parse({ model: CHAT.small, messages, response_format: zodResponseFormat(Ship, "ship") });
    Ship.parse(answer.choices[0].message.parsed);
  },
  async "`withResponse`, `asResponse`"() {
    const { data, response } = await chat.create({ model: CHAT.writer, messages }).withResponse();
    assert(data.choices[0].message.content.includes(QUESTION));
    assert(Number(response.headers.get("x-breakwater-cost-usd")) > 0);
    assert.equal((await chat.create({ model: CHAT.writer, messages }).asResponse()).status, 200);
  },
  async "what is left of a rate limit; the SDK's own backoff obeys `retry-after-ms`"() {
    const headers = limitedTask({ requests_per_minute: 5 });
    const { response } = await chat.create({ model: CHAT.small, messages }, { headers }).withResponse();
    const left = ["limit", "remaining"].map((what) => response.headers.get(`x-ratelimit-${what}-requests`));
    assert.deepEqual(left, ["5", "4"]);
    await checkBackoff((model, options) => chat.create({ model, messages }, options), OpenAI.RateLimitError);
  },
  async models() {
    const names = [];
    for await (const model of new OpenAI().models.list()) names.push(model.id);
    assert(names.includes(CHAT.writer));
  },
  async errors() {
    await assert.rejects(chat.create({ model: "no-such", messages }), OpenAI.NotFoundError);
    await assert.rejects(chat.create({ model: CHAT.writer, messages: [] }), OpenAI.BadRequestError);
    await assert.rejects(new OpenAI({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
  },
});
