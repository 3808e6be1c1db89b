// `@anthropic-ai/sdk`. It takes its base URL and key from the environment.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { CHAT, MESSAGES, QUESTION, RESPONSES, checkBackoff, each, limitedTask, run } from "./checks.mjs";

const client = new Anthropic();
const max_tokens = 4096;
const messages = [{ role: "user", content: QUESTION }];
const thinking = { type: "adaptive" };
const input_schema = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
const tools = [{ name: "find_ship", input_schema }];
const Ship = z.object({ name: z.string(), knots: z.number() });
const textOf = ({ content }) => content.filter(({ type }) => type === "text").map(({ text }) => text).join("");

// The calls of an answer, and the messages with what they gave.
function answered(before, { content }) {
  const calls = content.filter(({ type }) => type === "tool_use");
  const results = calls.map(({ id }) => ({ type: "tool_result", tool_use_id: id, content: "at sea" }));
  return [calls, [...before, { role: "assistant", content }, { role: "user", content: results }]];
}

await run("Messages", {
  ...each([MESSAGES, CHAT, RESPONSES], {
    async create({ writer: model }) {
      const answer = await client.messages.create({ model, max_tokens, messages, system: "Be brief." });
      assert(textOf(answer).includes(QUESTION) && answer._request_id);
      assert.deepEqual([answer.type, answer.role, answer.stop_reason], ["message", "assistant", "end_turn"]);
      assert(answer.usage.input_tokens > 0 && answer.usage.output_tokens > 0);
    },
    async stream({ writer: model }) {
      const [events, open] = [[], new Set()];
      for await (const event of await client.messages.create({ model, max_tokens, messages, stream: true })) {
        events.push(event.type);
        if (event.type === "content_block_start") assert(!open.size && open.add(event.index));
        if (event.type === "content_block_delta") assert(open.has(event.index));
        if (event.type === "content_block_stop") assert(open.delete(event.index));
      }
      const first = events[0], [ending, last] = events.slice(-2);
      assert.deepEqual([first, ending, last], ["message_start", "message_delta", "message_stop"]);
    },
    async "`stream()` helper"({ writer: model }) {
      let said = "";
      const stream = client.messages.stream({ model, max_tokens, messages }).on("text", (text) => (said += text));
      const answer = await stream.finalMessage();
      assert(said.includes(QUESTION) && textOf(answer) === said && answer.usage.output_tokens > 0);
    },
    async "tools and their results, streamed and not"({ writer: model }) {
      const asked = await client.messages.create({ model, max_tokens, messages, tools });
      const streamed = await client.messages.stream({ model, max_tokens, messages, tools }).finalMessage();
      for (const answer of [asked, streamed]) {
        const [[call], more] = answered(messages, answer);
        assert.deepEqual([call.name, call.input, answer.stop_reason], ["find_ship", { name: "ferry" }, "tool_use"]);
        const last = await client.messages.create({ model, max_tokens, messages: more, tools });
        assert.equal(last.stop_reason, "end_turn");
      }
    },
    async "`toolRunner`"({ writer: model }) {
      const found = [];
      const run = ({ name }) => found.push(name) && "at sea";
      const tool = betaZodTool({ name: "find_ship", description: "", inputSchema: z.object({ name: z.string() }), run });
      for (const stream of [false, true]) {
        const runner = client.beta.messages.toolRunner({ model, max_tokens, messages, tools: [tool], stream });
        assert.equal((await runner).stop_reason, "end_turn");
      }
      assert.deepEqual(found, ["ferry", "ferry"]);
    },
    async "`countTokens`"({ writer: model }) {
      assert((await client.messages.countTokens({ model, messages })).input_tokens > 0);
    },
  }),
  async "a tool loop with thinking blocks, streamed and not"() {
    const asked = { model: "claude-thinker", max_tokens, thinking, messages, tools };
    for (const answer of [await client.messages.create(asked), await client.messages.stream(asked).finalMessage()]) {
      const [thought] = answer.content;
      assert(thought.type === "thinking" && thought.thinking && thought.signature);
      const [[call], more] = answered(messages, answer);
      assert.equal(call.name, "find_ship");
      const last = await client.messages.stream({ ...asked, messages: more }).finalMessage();
      assert.equal(last.stop_reason, "end_turn");
      // Another model goes on with the same conversation, and the first one after it.
      const other = await client.messages.create({ model: CHAT.writer, max_tokens, messages: more, tools });
      const again = [...more, { role: "assistant", content: other.content }, ...messages];
      assert((await client.messages.create({ ...asked, tools: undefined, messages: again })).content.length);
    }
  },
  ...each([MESSAGES, CHAT, RESPONSES], {
    async "`parse`"({ small: model }) {
      const output_config = { format: zodOutputFormat(Ship) };
      Ship.parse((await client.messages.parse({ model, max_tokens, messages, output_config })).parsed_output);
    },
    async "images, documents and cache control"({ small: model }) {
      const source = { type: "base64", media_type: "image/png", data: "iVBORw0KGgo=" };
      const text = { type: "text", text: QUESTION, cache_control: { type: "ephemeral" } };
      const content = [{ type: "image", source }, text];
      const system = [{ type: "text", text: "Be brief.", cache_control: { type: "ephemeral", ttl: "1h" } }];
      const answer = await client.messages.create({ model, max_tokens, system, messages: [{ role: "user", content }] });
      assert(textOf(answer).includes(QUESTION));
    },
  }),
  async "bearer token, beta headers, models"() {
    const { ANTHROPIC_API_KEY: authToken } = process.env;
    const other = new Anthropic({ apiKey: null, authToken });
    const betas = ["interleaved-thinking-2025-05-14"];
    assert((await other.beta.messages.create({ model: MESSAGES.writer, max_tokens, messages, betas })).content.length);
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    assert(names.includes(MESSAGES.writer));
  },
  async "what is left of a rate limit; the SDK's own backoff obeys `retry-after-ms`"() {
    const create = (model, options) => client.messages.create({ model, max_tokens, messages }, options);
    const headers = limitedTask({ requests_per_minute: 5 });
    const { response } = await create(CHAT.small, { headers }).withResponse();
    const left = ["limit", "remaining"].map((what) => response.headers.get(`anthropic-ratelimit-requests-${what}`));
    assert.deepEqual(left, ["5", "4"]);
    await checkBackoff(create, Anthropic.RateLimitError);
  },
  async errors() {
    const ask = (fields, on = client) => on.messages.create({ model: CHAT.writer, max_tokens, messages, ...fields });
    const raised = (call, kind, type) =>
      assert.rejects(call, (error) => {
        assert(error instanceof kind, `${error.name} is no ${kind.name}`);
        assert.deepEqual([error.error.type, error.error.error.type], ["error", type]);
        assert(error.requestID);
        return true;
      });
    await raised(ask({ model: "no-such" }), Anthropic.NotFoundError, "not_found_error");
    await raised(ask({ messages: [] }), Anthropic.BadRequestError, "invalid_request_error");
    await raised(ask({ tools: [{ type: "web_search_20250305", name: "web_search" }] }), Anthropic.BadRequestError, "invalid_request_error");
    await raised(ask({}, new Anthropic({ apiKey: "wrong" })), Anthropic.AuthenticationError, "authentication_error");
  },
});
