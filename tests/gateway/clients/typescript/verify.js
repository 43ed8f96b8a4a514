// Says whether the library of Standard Webhooks verifies the request that it reads, as JSON.
import { readFileSync } from "node:fs";
import { Webhook, WebhookVerificationError } from "standardwebhooks";

const request = JSON.parse(readFileSync(0, "utf8"));
try {
    new Webhook(request.secret).verify(request.body, request.headers);
    console.log("verified");
} catch (error) {
    if (!(error instanceof WebhookVerificationError)) throw error;
    console.log("refused");
}
