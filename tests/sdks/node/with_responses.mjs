// `openai` for Node.js: Responses and embeddings. It takes its base URL and key from the environment.

import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { CHAT, EMBEDDER, MESSAGES, QUESTION, RESPONSES, each, run } from "./checks.mjs";

const { responses, embeddings } = new OpenAI();
const input = QUESTION;
const parameters = { type: "object", properties: { name: { type: "string" } }, required: ["name"], additionalProperties: false };
const tools = [{ type: "function", name: "find_ship", parameters, strict: true }];
const Ship = z.object({ name: z.string(), knots: z.number() });

async function settled(id) {
  for (;;) {
    const found = await responses.retrieve(id);
    if (!["queued", "in_progress"].includes(found.status)) return found;
    await sleep(50);
  }
}

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

const textOf = (events) =>
  events.filter(({ type }) => type === "response.output_text.delta").map(({ delta }) => delta).join("");

await run("Responses", {
  ...each([RESPONSES, CHAT, MESSAGES], {
    async create({ writer: model }) {
      const answer = await responses.create({ model, input, instructions: "Be brief." });
      assert(answer.output_text.includes(QUESTION));
      assert.deepEqual([answer.status, answer.error], ["completed", null]);
      assert(answer.usage.total_tokens > 0);
    },
    async "items in"({ writer: model }) {
      const content = [{ type: "input_text", text: QUESTION }];
      const items = [{ role: "developer", content: "Be brief." }, { type: "message", role: "user", content }];
      assert((await responses.create({ model, input: items })).output_text.includes(QUESTION));
    },
    async stream({ writer: model }) {
      const events = await all(await responses.create({ model, input, stream: true }));
      const { response } = events.at(-1);
      assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
      assert.deepEqual([events[0].type, events.at(-1).type], ["response.created", "response.completed"]);
      assert.equal(textOf(events), response.output.at(-1).content[0].text);
      assert(response.usage.total_tokens > 0 && textOf(events).includes(QUESTION));
    },
    async "`stream()` helper"({ writer: model }) {
      const stream = responses.stream({ model, input });
      let said = "";
      stream.on("response.output_text.delta", ({ delta }) => (said += delta));
      const answer = await stream.finalResponse();
      assert(said.includes(QUESTION) && answer.output_text === said);
    },
    async "tools and their outputs, streamed and not"({ writer: model }) {
      const asked = await responses.create({ model, input, tools });
      const streamed = await responses.stream({ model, input, tools }).finalResponse();
      for (const { output } of [asked, streamed]) {
        const call = output.find(({ type }) => type === "function_call");
        assert.deepEqual([call.name, JSON.parse(call.arguments)], ["find_ship", { name: "ferry" }]);
        const result = { type: "function_call_output", call_id: call.call_id, output: "at sea" };
        const items = [{ role: "user", content: QUESTION }, ...output, result];
        const answer = await responses.create({ model, tools, input: items });
        assert(answer.output_text && !answer.output.some(({ type }) => type === "function_call"));
      }
    },
  }),
  ...each([RESPONSES, CHAT, MESSAGES], {
    async "`parse`, and a stream of it"({ small: model }) {
      const text = { format: zodTextFormat(Ship, "ship") };
      Ship.parse((await responses.parse({ model, input, text })).output_parsed);
      Ship.parse((await responses.stream({ model, input, text }).finalResponse()).output_parsed);
    },
  }),
  ...each([RESPONSES, CHAT], {
    async "`previous_response_id`"({ writer: model }) {
      const first = await responses.create({ model, input: "I am on the quay." });
      const second = await responses.create({ model, input, previous_response_id: first.id });
      assert.equal(second.previous_response_id, first.id);
      assert(second.usage.input_tokens > first.usage.input_tokens && second.output_text.includes(QUESTION));
    },
    async "`retrieve`, `inputItems`, `delete`"({ writer: model }) {
      const { id, output_text } = await responses.create({ model, input });
      assert.equal((await responses.retrieve(id)).output_text, output_text);
      const items = await all(await responses.inputItems.list(id));
      assert.deepEqual(items.map(({ content }) => content[0].text), [QUESTION]);
      await responses.delete(id);
      await assert.rejects(responses.retrieve(id), OpenAI.NotFoundError);
    },
    async "background, polled"({ writer: model }) {
      const begun = await responses.create({ model, input, background: true });
      assert(["queued", "in_progress"].includes(begun.status));
      const done = await settled(begun.id);
      assert(done.status === "completed" && done.background && done.output_text.includes(QUESTION));
    },
    async "background stream, read again from where it was"({ writer: model }) {
      const seen = [];
      const stream = await responses.create({ model, input, background: true, stream: true });
      for await (const event of stream) {
        seen.push(event);
        if (event.type === "response.output_text.delta") break;
      }
      const [{ response: { id } }, { sequence_number: starting_after }] = [seen[0], seen.at(-1)];
      const rest = await all(await responses.retrieve(id, { stream: true, starting_after }));
      const [events, { output_text }] = [[...seen, ...rest], await responses.retrieve(id)];
      assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
      assert(textOf(events) === output_text && output_text.includes(QUESTION));
      assert.deepEqual(await all(await responses.retrieve(id, { stream: true })), events);
      assert.equal((await responses.stream({ response_id: id, starting_after }).finalResponse()).output_text, output_text);
    },
  }),
  async "`cancel`"() {
    const { id } = await responses.create({ model: "gpt-slow", input, background: true });
    assert.equal((await responses.cancel(id)).status, "cancelled");
    assert.equal((await settled(id)).status, "cancelled");
  },
  async "custom tools"() {
    const custom = [{ type: "custom", name: "find_ship" }];
    const { output } = await responses.create({ model: RESPONSES.writer, input, tools: [...tools, ...custom].slice(1) });
    assert(output.some(({ type }) => type.endsWith("_call")));
  },
  async "`withResponse`"() {
    const { data, response } = await responses.create({ model: RESPONSES.writer, input }).withResponse();
    assert(data._request_id && Number(response.headers.get("x-breakwater-cost-usd")) > 0);
  },
  async "errors, with the field"() {
    const refused = (fields, param, model = CHAT.writer) =>
      assert.rejects(responses.create({ model, input, ...fields }), (error) => {
        assert(error instanceof OpenAI.BadRequestError);
        assert.equal(error.param, param);
        return true;
      });
    await refused({ conversation: "conv_1" }, "conversation");
    await refused({ tools: [{ type: "web_search" }] }, "tools[0].type");
    await refused({ max_output_tokens: "many" }, "max_output_tokens");
    await assert.rejects(responses.retrieve("resp_none"), OpenAI.NotFoundError);
    await assert.rejects(responses.create({ model: "no-such", input }), OpenAI.NotFoundError);
  },
});

await run("embeddings", {
  async "one, many; `float`, `base64`"() {
    const lines = ["the ferry", "the quay"];
    const answer = await embeddings.create({ model: EMBEDDER, input: lines });
    const floats = await embeddings.create({ model: EMBEDDER, input: lines, encoding_format: "float" });
    assert.deepEqual(answer.data.map(({ index }) => index), [0, 1]);
    assert(answer.data[0].embedding.length > 100 && answer.usage.total_tokens > 0);
    for (const [index, { embedding }] of floats.data.entries())
      assert.deepEqual(Float32Array.from(embedding), Float32Array.from(answer.data[index].embedding));
  },
  async "`dimensions`, errors"() {
    const { data: [{ embedding }] } = await embeddings.create({ model: EMBEDDER, input: QUESTION, dimensions: 256 });
    assert.equal(embedding.length, 256);
    await assert.rejects(embeddings.create({ model: EMBEDDER, input: [] }), OpenAI.BadRequestError);
  },
});
