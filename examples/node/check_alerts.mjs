// Validates every alert against the schema of the wire contract; prints a line for each, and fails on an invalid one.
//
// Start with `make up`, then: npm install --prefix examples/node && node examples/node/check_alerts.mjs [DATA_DIR]
// With `--count N` it ends after N alerts, otherwise at Ctrl-C.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { connect } from "@nats-io/transport-node";
import addFormats from "ajv-formats";
import { Ajv2020 } from "ajv/dist/2020.js";

const { values, positionals } = parseArgs({ options: { count: { type: "string" } }, allowPositionals: true });
const endpoints = JSON.parse(readFileSync(`${positionals[0] ?? `${import.meta.dirname}/../../.breakwater`}/endpoints.json`, "utf8"));
const nats = new URL(endpoints.nats_url);
const schema = JSON.parse(readFileSync(new URL("../../proto/schemas/Alert.json", import.meta.url), "utf8"));
const isAlert = addFormats(new Ajv2020({ allErrors: true })).compile(schema);

const client = await connect({ servers: nats.host, user: nats.username, pass: nats.password, maxReconnectAttempts: -1 });
const alerts = client.subscribe("bw.alerts.>", { max: values.count && Number(values.count) });
await client.flush();
console.log("watching");
process.once("SIGINT", () => client.close());

for await (const message of alerts) {
  const alert = message.json(); // an alert can arrive twice, with the same `alert_id`
  if (!isAlert(alert)) {
    for (const { instancePath, message } of isAlert.errors) console.error(`${instancePath || "/"}: ${message}`);
    process.exitCode = 1;
    break;
  }
  console.log(`${alert.at}  ${alert.severity} ${alert.change}: ${alert.title} (${alert.incident_id}, ${alert.status})`);
}
await client.close();
