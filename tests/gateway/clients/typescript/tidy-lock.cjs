// npm runs this after each change of the dependencies: the lock file keeps versions and checksums, and no addresses.
const fs = require("fs");
const file = "package-lock.json";
const lock = JSON.parse(fs.readFileSync(file));
for (const one of Object.values(lock.packages)) {
  delete one.funding;
  delete one.resolved;
}
fs.writeFileSync(file, JSON.stringify(lock, null, 4) + "\n");
