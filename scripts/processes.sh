#!/usr/bin/env bash
# Tests of real processes, which wait most of the time, and beside them, at the lowest priority, simulation seeds, which
# never do: scripts/processes.sh SEEDS. Fails when either does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
log=$(mktemp)
nice -n 19 "$python" -m tests.simulation --seeds "$1" >"$log" 2>&1 &
seeds=$!
trap 'kill "$seeds" 2>/dev/null || true; rm -f "$log"' EXIT
failed=0
"$python" -m pytest -m processes || failed=$?
echo "waiting for the $1 seeds"
wait "$seeds" || failed=$?
cat "$log"
exit "$failed"
