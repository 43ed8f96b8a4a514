"""Guards of the documents: what the code has, they list, and what they list, the code has."""

from __future__ import annotations

import ast
import codeop
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

import timeline
from scripts import reference_pages, stores_page
from tests.documents.pages import DOCS, NEEDLESS, PAGES, README, REFERENCE, ROOT, blocks, first_words, table_names
from timeline import config, errors
from timeline.cli.app import COMMANDS, SETTINGS, cli
from timeline.cli.options import connection_page
from timeline.config import parse_duration_ms
from timeline.driver.queries import DURATIONS, NAMES, PERCENTS
from timeline.gateway.metrics import CATALOG as OF_THE_GATEWAY
from timeline.metrics import CATALOG
from timeline.model import LateCause, State, Status
from timeline.outbox.relay import CATALOG as OF_THE_RELAY

RUN_ELSEWHERE = {"js", "go", "bash"}
"""Receivers of webhooks: tests/gateway/push/test_receivers.py runs them."""
KNOWN_LANGUAGES = {"python", "sh", "toml", "ini", "yaml", "promql", "sql", "", *NEEDLESS, *RUN_ELSEWHERE}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, groups and what is in them alike."""
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                assert found is not None
                yield f"{name} {inner}", found


def test_every_metric_is_documented_with_its_kind_and_labels() -> None:
    rows = {}
    for line in (REFERENCE / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `timeline_"):
            name, kind, labels, means = (cell.strip() for cell in line.strip("|").split("|"))
            assert means, f"{name} has no meaning"
            rows[name.strip("`")] = (kind, {label.strip() for label in labels.split(",")} - {""})
    declared = {**CATALOG, **OF_THE_GATEWAY, **OF_THE_RELAY}
    assert rows == {name: (one.kind, set(one.labels)) for name, one in declared.items()}


def test_every_status_state_and_error_is_documented() -> None:
    page = REFERENCE / "statuses.md"
    kinds = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, timeline.TimelineError)
    } - {timeline.TimelineError}
    listed = first_words(page)
    assert {status.value for status in Status} <= listed
    assert {state.value for state in State} <= listed
    assert {kind.code for kind in kinds} <= listed
    assert {kind.__name__ for kind in kinds} <= table_names(page, 1)
    codes = {status.value for status in Status} | {kind.code for kind in kinds}
    assert {word for word in listed if re.fullmatch(r"[A-Z_]{2,}", word)} == codes


def test_statuses_stand_in_the_order_of_precedence() -> None:
    lines = (REFERENCE / "statuses.md").read_text(encoding="utf-8").splitlines()
    words = [line.strip("|").split("|")[0].strip() for line in lines if line.startswith("| ")]
    listed = [word for word in words if word in set(Status)]
    assert listed == [*timeline.model.PRECEDENCE, Status.UNAVAILABLE, Status.UNKNOWN]


def test_every_cause_of_lateness_is_documented() -> None:
    assert {cause.name for cause in LateCause} == {word for word in first_words(DOCS / "debug.md") if word.isupper()}


def test_every_topic_setting_is_documented() -> None:
    assert table_names(REFERENCE / "topic-settings.md") >= set(NAMES)
    units = ("_ms", "_percent")
    full = {name for name in timeline.TopicSettings.__dataclass_fields__ if name.endswith(units)}
    listed = table_names(REFERENCE / "topic-settings.md")
    assert {name for name in listed if name.endswith(units)} == full
    assert {name for name in listed if not name.endswith(units)} == set(NAMES)


def test_every_setting_of_serve_and_every_variable_is_documented() -> None:
    page = REFERENCE / "serve-settings.md"
    variables = {config.PREFIX + name.upper() for name in config.SETTINGS}
    listed = table_names(page)
    assert listed >= set(config.SETTINGS) | set(config.NOT_OF_SERVE)
    assert {name for name in listed if name.islower()} == set(config.SETTINGS)
    assert {name for name in listed | table_names(page, 1) if name.startswith(config.PREFIX)} == variables | set(
        config.NOT_OF_SERVE
    )


@pytest.mark.parametrize("setting", ["listen", "store", "sync", "metrics", "grace", "log_level", "log_format"])
def test_defaults_of_serve_are_what_the_page_says(setting: str) -> None:
    line = next(
        line
        for line in (REFERENCE / "serve-settings.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| `{setting}` |")
    )
    said = line.split("|")[3].strip().strip("`")
    plain = config.ServeConfig()
    if setting == "grace":
        assert config.parse_duration_ms(said) == plain.grace_ms
    else:
        assert said == getattr(plain, setting)


def test_defaults_of_topics_are_what_the_page_says() -> None:
    rows = {
        row[0].split("`")[1]: row[1].replace("`", "").partition(":")[0]
        for row in _rows((REFERENCE / "topic-settings.md").read_text(encoding="utf-8"))
        if row[0].startswith("`")
    }
    plain = timeline.TopicSettings()
    assert rows.pop("horizon") == "10 years" and plain.horizon_ms == 10 * 366 * 86_400_000
    assert rows.pop("lease_ahead") == '"auto" (−1)' and plain.lease_ahead_ms == -1
    said = {
        DURATIONS.get(name, name): parse_duration_ms(text) if name in DURATIONS else text
        for name, text in rows.items()
        if name not in PERCENTS
    }
    for name, full in PERCENTS.items():
        assert float(rows[name]) * 100 == getattr(plain, full)
    meant = {name: getattr(plain, name) for name in said}
    shown = {"max_payload_bytes": "1 MiB", "paused": "false", "push_url": '""'}
    assert said == {
        name: shown.get(name, str(value) if name not in DURATIONS.values() else value) for name, value in meant.items()
    }
    assert plain.max_payload_bytes == config.MIB and not plain.paused


@pytest.mark.parametrize("page", reference_pages.PAGES, ids=lambda page: page.stem)
def test_the_written_references_are_current(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == reference_pages.written(page), "run: make docs"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_tables_have_a_row_on_each_line(page: Path) -> None:
    """Folded like a paragraph, a table is shown as one."""
    plain = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    tables = [part.splitlines() for part in re.split(r"\n\s*\n", plain) if part.lstrip().startswith("|")]
    assert not [line for table in tables for line in table if not re.fullmatch(r" *\|.*\|", line)]
    assert not [table[0] for table in tables if not re.fullmatch(r" *\|( *:?-+:? *\|)+", table[1])]


def test_every_command_is_documented() -> None:
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^##+ (.+)$", text, re.MULTILINE)) == sorted(name for name, _ in commands())
    assert set(COMMANDS) <= table_names(REFERENCE / "commands.md")


def test_every_command_has_help_with_an_example_and_its_options_a_sentence() -> None:
    missing = [
        f"{name} {parameter.opts[-1]}"
        for name, command in commands()
        if not name.startswith("bench ")
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden and not parameter.help
    ]
    assert not missing
    assert not [name for name, command in commands() if "Example:" not in (command.help or "")]


def test_every_help_fits_into_80_columns() -> None:
    pages = [
        connection_page(80),
        *(
            command.get_help(click.Context(command, info_name=f"timeline {name}", **SETTINGS | {"terminal_width": 80}))
            for name, command in commands()
        ),
    ]
    assert not [line for page in pages for line in page.splitlines() if len(line) > 80]


def test_every_public_name_is_in_the_reference() -> None:
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) >= set(timeline.__all__)


def test_every_page_is_in_the_table_of_contents_and_every_block_says_its_language() -> None:
    contents = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = [page for page in DOCS.rglob("*.md") if page.name != "index.md"]
    assert len(pages) >= 12
    assert not [page for page in pages if str(page.relative_to(DOCS).with_suffix("")) not in contents.split()]
    unknown = [
        block.place for page in (*PAGES, README) for block in blocks(page) if block.language not in KNOWN_LANGUAGES
    ]
    assert not unknown


def test_the_guard_of_comments_knows_them_all() -> None:
    said = {block.said for page in (*PAGES, README, *REFERENCE.glob("*.md")) for block in blocks(page)} - {""}
    allowed = re.compile(r"for example|(runs until it prints|compiled only:|not run:) \S.*")
    assert not [comment for comment in said if not allowed.fullmatch(comment)]


def test_pages_name_no_file_of_the_repository_that_is_gone() -> None:
    named = re.compile(r"`((?:timeline|tests|scripts|examples|design-docs|schemas)/[\w./-]+)`")
    texts = [(page, page.read_text(encoding="utf-8")) for page in (*DOCS.rglob("*.md"), README)]
    assert not [
        f"{page.relative_to(ROOT)}: {name}"
        for page, text in texts
        for name in named.findall(text)
        if not (ROOT / name).exists()
    ]


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_the_picture_is_whole_and_asks_nobody_for_anything() -> None:
    picture = (DOCS / "demo.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    assert set(re.findall(r"\w+://[^\"'\s]+", picture)) == {"http://www.w3.org/2000/svg"}
    assert "DEPARTURES" in picture and "CRASHED" in picture


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_of_a_page_can_be_pasted_line_by_line(page: Path) -> None:
    """As `python -m asyncio` reads it: what is indented ends at an empty line, and at nothing else."""
    for block in blocks(page):
        if block.language != "python":
            continue
        read = codeop.CommandCompiler()
        read.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        typed: list[str] = []
        for line in [*block.body.splitlines(), ""]:
            typed.append(line)
            try:
                if read("\n".join(typed), symbol="single") is not None:
                    typed = []
            except SyntaxError as wrong:
                pytest.fail(f"{block.place}: not as a terminal takes it, at {line!r}: {wrong}")
        assert not "".join(typed).strip(), f"{block.place}: an empty line is missing before {typed[-2]!r}"


def test_pages_that_share_a_topic_put_different_messages() -> None:
    """Whoever follows one page after the other, in whatever order, on one broker, gets what each says."""
    put: dict[tuple[str, str], str] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh" and block.runs:
                for found in re.finditer(r"^timeline produce (\S+) .*--id (\S+)", block.body, re.MULTILINE):
                    before = put.setdefault((found[1], found[2]), page.name)
                    assert before == page.name, f"{before} and {page.name} both put {found[2]} on {found[1]}"


def test_no_two_pages_of_the_site_have_one_name_and_numbers_and_stores_are_named_alike() -> None:
    pages = [*DOCS.rglob("*.md"), *(ROOT / "design-docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]
    pages += [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
    heads = {page: re.findall(r"^# (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE) for page in pages}
    titles = {page: head[0] for page, head in heads.items()}
    named = [title for page, title in titles.items() if page not in (README, DOCS / "index.md")]
    assert len(named) == len(set(named))
    assert all(re.match(r"\d\d \w", title) for page, title in titles.items() if page.name[:2].isdigit())
    stores = [scheme for scheme, told in stores_page.told().items() if told.url]
    assert stores and all(titles[DOCS / f"{store}.md"].startswith("Keep messages in ") for store in stores)


def test_wherever_stores_are_listed_all_of_them_are() -> None:
    settings, peers = (REFERENCE / "serve-settings.md").read_text("utf-8"), (DOCS / "peers.md").read_text("utf-8")
    (store,) = [line for line in settings.splitlines() if line.startswith("| `store` ")]
    (ours,) = [line for line in peers.splitlines() if line.startswith("| **Timeline** | milliseconds, never early")]
    assert not [scheme for scheme in stores_page.plugins() if f"`{scheme}://" not in store] and "stores.md" in store
    assert "stores.md" in ours and "stores.md" in (DOCS / "operate.md").read_text("utf-8")[:300]


def test_every_example_says_how_long_it_takes() -> None:
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = {
        row.split("](")[0].strip("| ["): row.strip("| ").split(" | ")[-1] for row in table.splitlines() if "](" in row
    }
    for file in (ROOT / "examples").glob("*.py"):
        assert rows[file.name] and "`" not in rows[file.name].split(";")[0]
    assert "LADDER=" in rows["retry_ladder.py"] and "TASK_S=" in rows["long_task.py"]
