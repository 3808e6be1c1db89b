// `@openai/agents` with its defaults: Responses. It takes its base URL and key from the environment.

import assert from "node:assert/strict";
import { Agent, run as runAgent, tool } from "@openai/agents";
import { z } from "zod";
import { CHAT, QUESTION, RESPONSES, each, run } from "./checks.mjs";

const found = [];
const findShip = tool({
  name: "find_ship",
  description: "Finds a ship.",
  parameters: z.object({ name: z.string() }),
  execute: ({ name }) => found.push(name) && "at sea",
});

await run("Responses", {
  ...each([RESPONSES, CHAT], {
    async "`run`, and its stream"({ writer: model }) {
      const agent = new Agent({ name: "Harbour", instructions: "Be brief.", model });
      assert((await runAgent(agent, QUESTION)).finalOutput.includes(QUESTION));
      const streamed = await runAgent(agent, QUESTION, { stream: true });
      let said = "";
      for await (const piece of streamed.toTextStream()) said += piece;
      assert(said.includes(QUESTION) && streamed.finalOutput === said);
    },
    async "a tool, and its stream"({ writer: model }) {
      const agent = new Agent({ name: "Harbour", instructions: "Be brief.", model, tools: [findShip] });
      found.length = 0;
      await runAgent(agent, QUESTION);
      await (await runAgent(agent, QUESTION, { stream: true })).completed;
      assert.deepEqual(found, ["ferry", "ferry"]);
    },
  }),
  async "typed output"() {
    const outputType = z.object({ name: z.string(), knots: z.number() });
    outputType.parse((await runAgent(new Agent({ name: "Harbour", model: CHAT.small, outputType }), QUESTION)).finalOutput);
  },
  async "a handoff"() {
    const pilot = new Agent({ name: "Pilot", model: CHAT.small });
    const first = new Agent({ name: "Harbour", model: CHAT.small, handoffs: [pilot], modelSettings: { toolChoice: "required" } });
    assert.equal((await runAgent(first, QUESTION)).lastAgent.name, "Pilot");
  },
});
