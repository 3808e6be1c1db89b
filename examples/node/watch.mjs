// Prints alerts and breaker transitions as they happen, until Ctrl-C.
//
// Start with `make up`, then: npm install --prefix examples/node && node examples/node/watch.mjs [DATA_DIR]

import { readFileSync } from "node:fs";
import { connect } from "@nats-io/transport-node";

const endpoints = JSON.parse(readFileSync(`${process.argv[2] ?? `${import.meta.dirname}/../../.breakwater`}/endpoints.json`, "utf8"));
const client = await connect({
  servers: endpoints.nats_server,
  user: endpoints.nats_user, // `connect` ignores a user in the URL
  pass: endpoints.nats_password,
  maxReconnectAttempts: -1,
});

function show(error, message) {
  if (error) throw error;
  const event = message.json(); // an event can arrive twice, with the same `ce-id` header
  if (message.subject.startsWith("bw.alerts.")) {
    console.log(`${event.at}  ${event.severity}, ${event.change}: ${event.title}. ${event.text}`);
  } else {
    console.log(`${event.at}  ${event.agent} on ${event.model}: ${event.to_state}, ${event.reason}`);
  }
}

for (const subject of ["bw.alerts.>", "bw.breakers.>"]) client.subscribe(subject, { callback: show });
await client.flush();
console.log("watching");
process.once("SIGINT", () => client.close());
