"""`timeline store`: the schema of a store."""

from __future__ import annotations

import click

from timeline.cli.app import DONE, Suggesting, awaited, say
from timeline.cli.look.findings import check_there
from timeline.cli.options.values import Url
from timeline.cli.terminal.output import confirm, print_fields, print_json
from timeline.storage_plugins import make_store, shown
from timeline.storage_plugins.versions import Versions


@click.group(cls=Suggesting)
def store() -> None:
    """Look after a store's schema.

    \b
    Example:
      timeline store migrate sqlite:///timeline.db
    """


@store.command()
@click.argument("url", type=Url())
@click.option("--contract", is_flag=True, help="Take away what only brokers of the version before needed.")
@click.option("--yes", is_flag=True, help="Do not ask whether such brokers still run.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def migrate(url: str, contract: bool, yes: bool, as_json: bool) -> int:
    """Bring the schema of the store at URL to this Timeline's version.

    The first broker of a new version does that by itself: it adds what it needs, and brokers of the version before go
    on beside it. Once none of them is left, --contract takes away what only they needed; from then on they are refused,
    and one that runs still fails. A store does not know who uses it: so you are asked.

    \b
    Example:
      timeline store migrate sqlite:///timeline.db
      timeline store migrate sqlite:///timeline.db --contract --yes
    """
    found: list[Versions | None] = []

    async def work(contract: bool) -> None:
        opened = make_store(url)
        check_there(url, "migrate")
        try:
            await opened.open()
            found.append(await opened.migrate(contract))
        finally:
            await opened.close()

    awaited(work(contract=False))
    reached = found[-1]
    if contract and reached is not None and reached.oldest < reached.version:
        if not yes:
            confirm(f"Brokers of schema version {reached.oldest} fail from now on. Has the last of them ended?")
        awaited(work(contract=True))
        reached = found[-1]
    if as_json:
        versions = {"version": reached and reached.version, "oldest": reached and reached.oldest}
        print_json({"url": shown(url), **versions})
    elif reached is None:
        say(f"{shown(url)} has no schema to migrate")
    else:
        shares = f"brokers of {reached.oldest} may share it" if reached.oldest < reached.version else "contracted"
        print_fields({"store": shown(url), "schema version": f"{reached.version}, {shares}"})
    return DONE
