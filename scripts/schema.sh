#!/usr/bin/env bash
# Generates timeline/wire/generated from schemas/fbs/timeline.fbs: flatc's accessors and the layout that the codec reads.
# Another folder may be named as the first argument (the test that the generated code is current does).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${1:-timeline/wire/generated}
python=${PYTHON:-.venv/bin/python}

if ! command -v flatc >/dev/null; then
    echo "schema: flatc is missing; on Debian or Ubuntu: sudo apt-get install -y flatbuffers-compiler" >&2
    exit 1
fi
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
flatc --python --gen-onefile -o "$made" schemas/fbs/timeline.fbs
flatc -b --schema --bfbs-builtins -o "$made" schemas/fbs/timeline.fbs
mkdir -p "$target"
"$python" scripts/wire_layout.py "$made/timeline.bfbs" "$target/layout.py"
cp "$made/timeline_generated.py" "$target/accessors.py"
printf '"""Generated from schemas/fbs/timeline.fbs by scripts/schema.sh; untouched by hand."""\n' >"$target/__init__.py"
