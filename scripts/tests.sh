#!/usr/bin/env bash
# Run tests, and beside them, at the lowest priority, simulation seeds: scripts/tests.sh SEEDS FIRST PYTEST-OPTIONS…
# Tests of servers and processes wait most of their time; seeds never do. Fails when either fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
log=$(mktemp)
nice -n 19 "$python" -m tests.simulation --seeds "$1" --first "$2" >"$log" 2>&1 &
seeds=$!
trap 'kill "$seeds" 2>/dev/null || true; rm -f "$log"' EXIT
failed=0
"$python" -m pytest "${@:3}" || failed=$?
echo "waiting for $1 simulation seeds from $2"
wait "$seeds" || failed=$?
cat "$log"
exit "$failed"
