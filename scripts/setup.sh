#!/usr/bin/env bash
# Create .venv with Timeline and all its tools, then touch the stamp named as the first argument.
# All output goes to standard error, so that `make run ARGS=--json` stays readable for machines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec 1>&2
stamp=${1:?usage: scripts/setup.sh STAMP}

# Two targets started at once must not build the same environment. The second one waits, and finds it done.
if command -v flock >/dev/null; then
    exec 9<pyproject.toml
    flock 9
fi
if [[ -e $stamp && ! pyproject.toml -nt $stamp && ! constraints.txt -nt $stamp && ! scripts/setup.sh -nt $stamp ]]; then
    exit 0
fi

can_install() { [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; }

# Add missing packages. Installed ones keep their version, because other programs may need it.
updated=no
install() {
    if [[ $updated = no ]]; then
        apt-get update -qq || return
        updated=yes
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends --no-upgrade "$@" </dev/null
}

# Print the first Python that is new enough and can make a virtual environment. Only running it is a sure test: a
# version manager's shim may exist without its Python, and Debian ships `venv` apart from Python.
usable_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if "$candidate" -c 'import sys, ensurepip, venv; ensurepip.version(); sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

find_python() {
    usable_python && return
    if can_install; then
        echo "setup: no Python >= 3.11 with venv here; installing it" >&2
        install python3 python3-venv >&2 || true
        usable_python && return
        # A distribution with an older python3 may have a newer one too.
        install python3.11 python3.11-venv >&2 || true
        usable_python && return
    fi
    echo "setup: Timeline needs Python >= 3.11 with its venv module. On Debian or Ubuntu run:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y python3 python3-venv" >&2
    echo "or name another Python:  make setup PYTHON=/path/to/python3.12" >&2
    return 1
}

if ! .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$(find_python)
    echo "setup: creating .venv with $("$python" --version) ($python)"
    "$python" -m venv --clear .venv
fi

if ! command -v flatc >/dev/null; then
    if ! can_install || ! install flatbuffers-compiler; then
        echo "setup: flatc is missing. Only 'make schema' and the test that the generated wire code is current need it:"
        echo "    sudo apt-get update && sudo apt-get install -y flatbuffers-compiler"
    fi
fi

pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
echo "setup: installing Timeline and its tools into .venv"
# Build tools come first, pinned like the rest, so that a build fetches nothing: hatchling for Timeline, setuptools for
# etcd3, which has no wheel. The tools in a new venv are too old, or missing.
pip install -c constraints.txt pip hatchling editables setuptools
# The package was once called `timeline`. Both names at once would register each storage plugin twice.
pip uninstall --yes timeline 2>/dev/null
pip install -c constraints.txt --no-build-isolation -e '.[all,dev]'
pip check
touch "$stamp"
echo "setup: done"
