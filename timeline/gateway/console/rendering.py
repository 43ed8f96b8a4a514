"""Pages from templates, and the files that they need, with the headers that keep strangers' texts harmless."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Response, get
from litestar.exceptions import NotFoundException
from markupsafe import Markup, escape

from timeline.driver.late import LEARNT, Cause
from timeline.driver.times import iso
from timeline.watcher import OBJECTIVE, OBJECTIVE_MS
from timeline.wording import printable, shown_duration, shown_lateness, typed_name, typed_value

FOLDER = Path(__file__).parent
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HERE = {
    Cause.NO_CONSUMER: "keep a consumer connected: the topic's page shows who is",
    Cause.STORE_SLOW: "look at the disk or the database behind the store; the topic's setting lease-ahead, say 1s, "
    "leases before short stalls",
    Cause.RATE_LIMITED: "the topic's setting max-rate-per-s raises the limit, and 0 lifts it",
    Cause.LEASE_RAN_OUT: "it was delivered before and not settled in time: the topic needs a longer lease, or its "
    "consumer extends it while it works",
}
"""Advice where the console has other means than the command line."""
FOR_EVER = "public, max-age=31536000, immutable"


def page(template: str, values: dict[str, Any], status: int = 200) -> Response[bytes]:
    """Return a page, or a part of one, as an answer that nobody keeps."""
    body = _environment().get_template(template).render(values).encode("utf-8", "replace")
    headers = {**SECURITY, "Cache-Control": "no-store"}
    return Response(body, status_code=status, media_type="text/html", headers=headers)


def part(template: str, **values: Any) -> str:
    """Return a part of a page as text."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "advised": lambda late: advice(late.cause, bool(late.consumer)),
        "block": block,
        "count": lambda number: f"{number:,}",
        "duration": shown_duration,
        "exact": exact,
        "lateness": shown_lateness,
        "setting": typed_name,
        "share": share,
        "typed": typed_value,
        "when": when,
    }
    made.globals |= {"static": static_path, "link": link, "objective": OBJECTIVE, "objective_ms": OBJECTIVE_MS}
    return made


def _shown(value: object) -> object:
    """Return what a template shows of a value. Texts of others stay on their line, and turn no other text around."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def advice(cause: Cause, over: bool) -> str:
    """Return what may be done about a cause, here. `over`: the message was delivered."""
    if cause is Cause.PAUSED and not over:
        return "Resume on the topic's page lets it deliver"
    return HERE.get(cause) or LEARNT[cause]


def share(value: float) -> str:
    """Return a share (0 to 1) in percent, rounded down, so that a missed objective never looks kept."""
    return f"{math.floor(value * 10_000 + 1e-9) / 100:g} %"


def exact(value: object) -> Markup:
    """Return a value for the field of a form, which sends it back as it is. It is not for people to read."""
    return escape(str(value))


def block(text: str) -> Markup:
    """Return a text of several lines for a `<pre>`. Its lines and tabs stay. All else that is invisible is escaped."""
    lines = ("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    return escape("\n".join(lines))


def when(at_ms: int | None, empty: str = "–") -> Markup:
    """Return a time, which the browser shows in its own zone. Without a script it stands in UTC."""
    if not at_ms:
        return escape(empty)
    machine = iso(at_ms)
    text = machine.replace("T", " ").removesuffix("Z")
    return Markup(f'<time datetime="{machine}" title="{text} UTC">{text}</time>')


def link(path: str, **values: object) -> str:
    """Return the address of a page with a query. Values that are None or empty are left out."""
    given = {name: value for name, value in values.items() if value not in (None, "", (), [])}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


@cache
def _files() -> dict[str, tuple[str, bytes]]:
    """Return the static files by the name under which they are asked for, which changes with what they hold."""
    found = {}
    for file in sorted((FOLDER / "static").iterdir()):
        if file.suffix in KINDS:
            held = file.read_bytes()
            found[f"{hashlib.sha256(held).hexdigest()[:12]}.{file.name}"] = (KINDS[file.suffix], held)
    return found


@cache
def static_path(name: str) -> str:
    """Return the address of a static file."""
    return next(f"/static/{hashed}" for hashed in _files() if hashed.partition(".")[2] == name)


@get("/static/{name:str}", include_in_schema=False)
async def static(name: str) -> Response[bytes]:
    """Return a file that pages need."""
    if name not in _files():
        raise NotFoundException
    kind, held = _files()[name]
    return Response(held, media_type=kind, headers={**SECURITY, "Cache-Control": FOR_EVER})
