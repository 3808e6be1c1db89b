// Publishes a job to NATS and prints its result.
//
// Start with `make up`, then: npm install --prefix examples/node && node examples/node/submit.mjs [DATA_DIR]

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { jetstream } from "@nats-io/jetstream";
import { connect, createInbox } from "@nats-io/transport-node";

const endpoints = JSON.parse(readFileSync(`${process.argv[2] ?? `${import.meta.dirname}/../../.breakwater`}/endpoints.json`, "utf8"));
// Names in subjects are percent-encoded; encodeURIComponent skips seven characters that must be encoded, too.
const token = (text) =>
  encodeURIComponent(text).replace(/[.!~*'()]/g, (c) => "%" + c.charCodeAt(0).toString(16).toUpperCase());

const client = await connect({ servers: endpoints.nats_server, user: endpoints.nats_user, pass: endpoints.nats_password });
const inbox = createInbox();
const results = client.subscribe(inbox, { max: 1, timeout: 60_000 });
const job = {
  agent: "content-writer",
  job_id: randomUUID(), // if no acknowledgement arrives, publish again with the same id: the job runs once
  prompt: "Write a haiku about harbours.",
  reply_to: inbox,
};
// A plain publish would be fire and forget; once JetStream's returns, the job is accepted.
await jetstream(client).publish(`bw.jobs.${token(job.agent)}`, JSON.stringify(job));
for await (const message of results) {
  const result = message.json();
  const cost = result.total_cost === null ? "cost unknown" : `$${result.total_cost}`; // a decimal string: no float
  console.log(result.status === "succeeded" ? result.output : `${result.status}: ${result.error.message}`);
  console.log(`${result.chosen_model}, ${result.attempts_count} attempt(s), ${cost}`);
  process.exitCode = result.status === "succeeded" ? 0 : 1;
}
await client.close();
