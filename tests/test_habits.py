"""Guards of the project's habits: what a reviewer would otherwise have to notice each time."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from timeline.wording import DISTRIBUTION

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "timeline"
TESTS = ROOT / "tests"

MAX_LINES = 900
BASE_DEPENDENCIES = {"grpcio", "numpy"}
# What only an extra brings: a driver-only install must import without them.
EXTRAS_ONLY = ("prometheus_client", "grpc_health", "sqlalchemy", "click", "rich", "pyarrow", "cronsim", "dateutil")

# The core is handed its time and its randomness and does no I/O.
NOT_IN_CORE = {"time", "random", "secrets", "uuid", "grpc", "sqlalchemy", "sqlite3"}
CORE = ("kinds", "leases", "recurrence", "schedules", "model.py", "columns.py", "errors.py", "broker", "wire")
# The broker's shell: it meets the network, the process and the clock so that the rest need not.
SHELL = {
    "broker/server/calls.py",
    "broker/server/certificates.py",
    "broker/server/probes.py",
    "broker/server/service.py",
}

SLEEPING_CALLS = ("time.sleep", "asyncio.sleep", "threading.Event().wait")
# Its `until` polls a condition for all tests that cannot await it.
MAY_SLEEP = "tests/conditions.py"


def _modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if path.parent.name != "generated")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _core_modules() -> list[Path]:
    found: list[Path] = []
    for part in CORE:
        where = PACKAGE / part
        found += _modules(where) if where.is_dir() else [where]
    return [path for path in found if path.relative_to(PACKAGE).as_posix() not in SHELL]


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and full name of everything that a module imports, at its top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def sleeping_calls(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that call time.sleep, asyncio.sleep, or wait with a time on an event made in the same expression,
    under whatever names. A time of literally 0 is no sleep."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def full_name(called: ast.expr) -> str:
        if isinstance(called, ast.Attribute):
            return f"{full_name(called.value)}.{called.attr}"
        if isinstance(called, ast.Call):
            return f"{full_name(called.func)}()"
        return names.get(called.id, "") if isinstance(called, ast.Name) else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and full_name(node.func) in SLEEPING_CALLS:
            times = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(not isinstance(time, ast.Constant) or time.value for time in times):
                yield node.lineno


def _tracked_texts() -> list[tuple[str, str]]:
    """(name, text) of each text file in the repository; a source tree without git has nothing to publish."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    texts = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue
        try:
            texts.append((name, path.read_bytes().decode("utf-8")))
        except UnicodeDecodeError:
            continue  # data, not text
    assert texts
    return texts


def _matches(pattern: str, texts: list[tuple[str, str]]) -> list[str]:
    compiled = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in texts
        for number, line in enumerate(text.splitlines(), start=1)
        if compiled.search(line)
    ]


def test_modules_stay_small() -> None:
    modules = _modules(PACKAGE) + _modules(TESTS)
    assert modules
    lengths = {_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def test_modules_are_named_after_what_they_are() -> None:
    vague = re.compile(r"(^|_)(utils?|common|managers?|helpers?|misc)($|_)")
    named = [path for folder in (PACKAGE, TESTS) for path in folder.rglob("*") if path.suffix in {"", ".py"}]
    assert named
    assert not [_name(path) for path in named if vague.search(path.stem)]


def test_the_shell_is_there() -> None:
    assert not [name for name in SHELL if not (PACKAGE / name).is_file()]


def test_core_reads_no_clock_no_randomness_and_no_driver() -> None:
    modules = _core_modules()
    assert modules
    assert not [
        f"{_name(path)}:{line}: imports {name}"
        for path in modules
        for line, name in imported_names(_parsed(path))
        if name.partition(".")[0] in NOT_IN_CORE
    ]


def test_clock_module_is_the_only_one_that_reads_the_wall_clock() -> None:
    wall = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow|today)\(|\bdate\.today\(")
    readers = {_name(path) for path in _modules(PACKAGE) if wall.search(path.read_text(encoding="utf-8"))}
    assert readers <= {"timeline/clock.py"}


def test_commands_print_through_what_makes_texts_printable() -> None:
    """`say`, `complain` and `Screen`: else what somebody else wrote gives a terminal orders."""
    raw = re.compile(r"\bclick\.s?echo\(|(?<![.\w])print\(|\bConsole\(|\bstdout\.write\(|\bstderr\.write\(")
    found = {_name(path) for path in _modules(PACKAGE / "cli") if raw.search(path.read_text(encoding="utf-8"))}
    assert found <= {f"timeline/cli/{name}.py" for name in ("about", "app", "output")}


def test_what_a_class_leaves_to_others_is_abstract() -> None:
    """So a class that forgets a method cannot be instantiated, instead of failing when it is called."""
    raising = re.compile(r"\braise NotImplementedError\b")
    assert not [_name(path) for path in _modules(PACKAGE) if raising.search(path.read_text(encoding="utf-8"))]


def test_tests_do_not_sleep() -> None:
    suspect = re.compile(r"sleep|Event\b")
    tests = [path for path in _modules(TESTS) if suspect.search(path.read_text(encoding="utf-8"))]
    sleeps = [f"{_name(path)}:{line}" for path in tests for line in sleeping_calls(_parsed(path))]
    others = [sleep for sleep in sleeps if not sleep.startswith(f"{MAY_SLEEP}:")]
    assert not others, f"await a condition; if nothing announces it, call `until` of {MAY_SLEEP}"
    assert len(sleeps) == 1, f"only `until` sleeps in {MAY_SLEEP}"


def test_what_is_not_installed_is_judged_in_one_place() -> None:
    """A test that skips by itself would skip in CI, too."""
    tests = [(_name(path), path.read_text(encoding="utf-8")) for path in _modules(TESTS)]
    assert not _matches(r"pytest\.skip\(.*install|importor[s]kip|mark\.skip[i]f", tests)


@pytest.mark.parametrize(
    ("source", "sleeps"),
    [
        ("import time\ntime.sleep(0.1)", True),
        ("import asyncio as a\nasync def f():\n    await a.sleep(1)", True),
        ("from time import sleep as rest\nrest(2)", True),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0)", False),
        ("def sleep(x): ...\nsleep(3)", False),
        ("import threading\nthreading.Event().wait(0.001)", True),
        ("from threading import Event as Tick\nTick().wait(timeout=PAUSE_S)", True),
        ("import threading\nthreading.Event().wait()", False),
        ("import asyncio\nasync def f():\n    await asyncio.Event().wait()", False),
        ("def wait(event):\n    event.wait(60)", False),
    ],
)
def test_the_sleep_guard_sees_every_spelling(source: str, sleeps: bool) -> None:
    assert bool(list(sleeping_calls(ast.parse(source)))) is sleeps


def test_the_import_guard_sees_imports_inside_functions() -> None:
    tree = ast.parse("def f():\n    import time\n    from sqlalchemy.engine import Engine")
    assert [name for _, name in imported_names(tree)] == ["time", "sqlalchemy.engine"]


def test_no_path_of_one_machine_is_in_the_repository() -> None:
    folders = "|".join(["work", "root", "home"])
    assert not _matches(rf"(?<![\w./-])/({folders})/", _tracked_texts())


def test_no_address_of_a_registry_is_in_the_repository() -> None:
    hosts = [r"pypi\.", r"files\.python", r"registry\.npm", r"repo\.maven", r"proxy\.golang", r"deb\.debian"]
    assert not _matches("|".join(host + r"\w*\.?(org|js|apache|hosted)" for host in hosts), _tracked_texts())
    ours = r"^(constraints\.txt|Makefile|pyproject\.toml|\.ci/|scripts/)"
    installing = re.compile(rf"{ours}|/(package.*\.json|\.npmrc|go\.\w+)$")
    texts = [(name, text) for name, text in _tracked_texts() if installing.search(name)]
    assert texts
    assert not _matches(r"https?:(?=/)|(index|find)-(url|links)|trusted[-]host", texts)


def test_nothing_tells_to_install_what_is_somebody_elses() -> None:
    """`timeline` on PyPI is another project. The import and the command are called so, the distribution is not."""
    texts = [(name, text) for name, text in _tracked_texts() if name != "CHANGELOG.md"]
    assert not _matches(r"install [\"']?timeline(?![\w-])", texts)
    assert not _matches(r"(?<![\w.-])timeline\\?[\[]", texts)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    spelt = [_name(path) for path in _modules(PACKAGE) if DISTRIBUTION in path.read_text(encoding="utf-8")]
    assert spelt == ["timeline/wording.py"], "the others take it from there"


def _requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def test_a_driver_needs_two_packages_and_every_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert _requirement_names(project["dependencies"]) == BASE_DEPENDENCIES
    wanted = set(BASE_DEPENDENCIES)
    for requirements in project["optional-dependencies"].values():
        wanted |= _requirement_names(requirements)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert not [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)]
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    assert wanted - {DISTRIBUTION} <= pinned


def test_every_pin_installs_on_the_oldest_python_that_is_promised() -> None:
    """On a newer Python nobody would notice: there pip finds what it hides from an older one."""
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    oldest = re.fullmatch(r">=(\d+\.\d+)", promised)
    assert oldest is not None
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==")[0] for line in lines if line and not line.startswith("#")]
    wanted = {}
    for pin in pins:
        try:
            wanted[pin] = metadata.metadata(pin).get("Requires-Python") or ""
        except metadata.PackageNotFoundError:
            continue  # of an extra, or of a machine, that is not here
    assert len(wanted) > len(BASE_DEPENDENCIES)
    assert not {pin: asked for pin, asked in wanted.items() if not SpecifierSet(asked).contains(f"{oldest[1]}.0")}


def _python_without(modules: tuple[str, ...], statements: str) -> subprocess.CompletedProcess[str]:
    """Runs `statements` in a Python to which `modules` look as if they were not installed."""
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in modules)
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {blocked}; {statements}"], cwd=ROOT, capture_output=True, text=True
    )


def test_the_package_imports_without_any_extra() -> None:
    asked = "import timeline, timeline.__main__; timeline.connect, timeline.connect_sync; assert timeline.__version__"
    done = _python_without(EXTRAS_ONLY, asked)
    assert done.returncode == 0, done.stderr


def test_the_command_line_names_the_extra_it_needs() -> None:
    done = _python_without(("click", "rich"), "from timeline.__main__ import main; sys.exit(main())")
    assert done.returncode != 0
    assert re.search(r"timeline-scheduler\[(cli|server|all)\]", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
