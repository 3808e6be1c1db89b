// `@openai/agents` with a model of each kind of provider: its loop of tools, with thinking, whole and streamed.

import assert from "node:assert/strict";
import { Agent, run as runAgent, tool } from "@openai/agents";
import { z } from "zod";
import { ANSWER, KINDS, QUESTION, each, run, taskOf, thoughtOf } from "./checks.mjs";

const found = [];
const findShip = tool({
  name: "find_ship",
  description: "Finds a ship.",
  parameters: z.object({ name: z.string() }),
  execute: ({ name }) => found.push(name) && "at sea",
});

const clerk = (model, streamed) => {
  found.length = 0;
  const headers = taskOf(model, "@openai/agents", "Responses", streamed);
  const modelSettings = { reasoning: { effort: "low", summary: "auto" }, providerData: { extra_headers: headers } };
  return new Agent({ name: "Harbour", instructions: "Be brief.", model, modelSettings, tools: [findShip] });
};

const examine = (model, result) => {
  assert.equal(result.finalOutput, ANSWER);
  assert.deepEqual(found, ["ferry"]);
  const items = result.newItems.filter(({ type }) => type === "reasoning_item").map(({ rawItem }) => rawItem);
  // Its own content is the summary; what is no summary stays with the provider's data.
  const texts = items.map(({ content, providerData }) =>
    (content.length ? content : (providerData?.content ?? [])).map(({ text }) => text).join(""),
  );
  assert.equal(texts[0] ?? "", thoughtOf(model, "Responses"), JSON.stringify(items));
};

await run("Responses", {
  ...each(KINDS, {
    async "each kind of provider: tools and thinking"({ writer: model }) {
      examine(model, await runAgent(clerk(model, false), QUESTION));
    },
    async "each kind of provider: streamed tools and thinking"({ writer: model }) {
      const result = await runAgent(clerk(model, true), QUESTION, { stream: true });
      await result.completed;
      examine(model, result);
    },
  }),
});
