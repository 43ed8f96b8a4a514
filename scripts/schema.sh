#!/usr/bin/env bash
# Generate two files from schemas/fbs/timeline.fbs: the codec's layout, into timeline/wire/generated, and flatc's
# accessors for tests, into tests/wire/generated. The first argument may name another folder instead of the repository;
# the test that the generated code is current does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=${1:-.}
python=${PYTHON:-.venv/bin/python}

if ! command -v flatc >/dev/null; then
    echo "schema: flatc is missing; on Debian or Ubuntu: sudo apt-get install -y flatbuffers-compiler" >&2
    exit 1
fi
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
flatc --python --gen-onefile -o "$made" schemas/fbs/timeline.fbs
flatc -b --schema --bfbs-builtins -o "$made" schemas/fbs/timeline.fbs
for package in timeline tests; do
    mkdir -p "$root/$package/wire/generated"
    printf '"""Generated from schemas/fbs/timeline.fbs by scripts/schema.sh; untouched by hand."""\n' \
        >"$root/$package/wire/generated/__init__.py"
done
"$python" scripts/wire_layout.py "$made/timeline.bfbs" "$root/timeline/wire/generated/layout.py"
cp "$made/timeline_generated.py" "$root/tests/wire/generated/accessors.py"
