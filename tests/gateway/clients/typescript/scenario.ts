// One scenario by openapi-fetch, with the types that openapi-typescript has generated: scenario.js URL TOPIC.
// See ../scenario.py.
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

const [url, topic] = process.argv.slice(2) as [string, string];
const client = createClient<paths>({ baseUrl: url });
const inTopic = { params: { path: { topic } } };
const one = (id: string) => ({ params: { path: { topic, id } } });

// Returns what a call answered; openapi-fetch gives a problem as an error.
function told<T>(answer: { data?: T; error?: unknown }): NonNullable<T> {
    if (!answer.data) throw new Error(JSON.stringify(answer.error));
    return answer.data;
}

async function leased(): Promise<components["schemas"]["LeasedMessage"]> {
    const answer = await client.POST("/v1/topics/{topic}/leases", { ...inTopic, body: { wait: "30s", lease: "1m" } });
    return told(answer).messages[0]!;
}

async function ack(receipt: string): Promise<string> {
    return told(await client.POST("/v1/leases:ack", { body: { receipts: [receipt] } })).results[0]!.status;
}

const made = told(await client.PUT("/v1/topics/{topic}", { ...inTopic, body: { lease: "30s" } }));
console.log("create", made.name === topic, made.settings.lease_ms);
const messages = [
    { id: "moved", payload: { gate: "A7" }, in: "1h" },
    { id: "cancelled", payload: 1, in: "1h" },
];
const put = told(await client.POST("/v1/topics/{topic}/messages", { ...inTopic, body: messages }));
if (typeof put === "string" || !("results" in put)) throw new Error("no answer per message");
console.log("put", ...put.results.map((each) => `${each.id} ${each.status} ${each.version}`));
const moved = told(await client.PATCH("/v1/topics/{topic}/messages/{id}", { ...one("moved"), body: { in: 0 } }));
console.log("move", moved.status, moved.version);
console.log("cancel", told(await client.DELETE("/v1/topics/{topic}/messages/{id}", one("cancelled"))).status);
console.log("show", (await client.GET("/v1/topics/{topic}/messages/{id}", one("cancelled"))).error!.code);
const first = await leased();
const gate = (first.payload as { gate: string }).gate;
console.log("lease", first.id, gate, first.deliveries, new Date(first.lease_until) > new Date(first.due));
console.log("ack", await ack(first.receipt), await ack(first.receipt));

const letter = { id: "letter", payload_text: "hi", in: 0 };
const single = told(await client.POST("/v1/topics/{topic}/messages", { ...inTopic, body: letter }));
if (typeof single === "string" || !("status" in single)) throw new Error("no answer for one message");
console.log("put", single.status);
const bury = { receipts: [(await leased()).receipt], reason: "no such gate" };
console.log("bury", told(await client.POST("/v1/leases:bury", { body: bury })).results[0]!.status);
const dead = told(await client.GET("/v1/topics/{topic}/dead", inTopic)).messages[0]!;
console.log("dead", dead.id, dead.reason);
const revive = { ...inTopic, body: { ids: ["letter"] } };
console.log("revive", told(await client.POST("/v1/topics/{topic}/dead:revive", revive)).counts["OK"]);
const again = await leased();
console.log("lease", again.id, again.payload_text, again.deliveries);
console.log("ack", await ack(again.receipt));

const daily = { name: "daily", cron: "0 9 * * *", payload: { of: "{occurrence}" }, paused: false };
const schedule = told(await client.POST("/v1/topics/{topic}/schedules", { ...inTopic, body: daily }));
const of = (schedule.payload as { of: string }).of;
console.log("schedule", schedule.name, schedule.revision, ...schedule.cron, of);
const path = { topic, name: "daily" };
const change = {
    params: { path, query: { if_revision: 1 } },
    body: { cron: ["0 9 * * *", "0 18 * * *"], zone: "Europe/Berlin" },
};
const changed = told(await client.PATCH("/v1/topics/{topic}/schedules/{name}", change));
console.log("change", changed.revision, changed.cron.length, changed.zone);
const four = { params: { path, query: { limit: 4 } } };
const { times } = told(await client.GET("/v1/topics/{topic}/schedules/{name}/next", four));
console.log("next", times.length, times[0]!.at < times[3]!.at);
console.log("pause", told(await client.POST("/v1/topics/{topic}/schedules/{name}:pause", { params: { path } })).status);
console.log("delete", (await client.DELETE("/v1/topics/{topic}/schedules/{name}", { params: { path } })).response.status);
