"""One request of a browser: who asks, by which client, and what the page that answers has in common with the others.

A token that somebody logged in with lies in a cookie that no script reads. Each form has a secret that another site
cannot know, and a request that changes something must come from a page of this gateway.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, quote
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from litestar import Response
from litestar.datastructures import Cookie

from timeline.driver.times import instant_ms, parse_iso
from timeline.errors import Forbidden, Invalid, NotFound, TimelineError, sentence_of
from timeline.gateway.clients import Caller, CallerClient
from timeline.gateway.console.rendering import SECURITY, page
from timeline.gateway.requests import ApiRequest
from timeline.gateway.service import HttpGateway, gateway_of
from timeline.gateway.values import due_of
from timeline.model import Status, Topic
from timeline.wording import nearest_zones, no_such_topic

TOKEN, OPERATOR, CSRF, NOTICE = "timeline_token", "timeline_operator", "timeline_csrf", "timeline_notice"
FORM = "application/x-www-form-urlencoded"
FIELD = "csrf"
LOGIN_S = 12 * 3_600
NOTICE_S = 60
MAX_NOTICE = 1_000
MOST_FIELDS = 20_000
IN_DOUBT = "it may have happened: look before you ask for it again"
WHOLE = re.compile(r"-?[0-9]{1,18}")
WORDS = (
    ("add --as-operator, or connect(…, as_operator=True)", "log out, and tick 'Act as an operator' when you log in"),
    (" (create_topic, 'timeline topic create')", " on the overview"),
    ("or cancel with leased=True", "or tick 'Cancel it although a consumer has it'"),
    ('if_exists="replace" to replace that message', "cancel that message first"),
    ("after retry_after_ms", "in a moment"),
)
"""Words of the driver and of the command line, and what stands for them on pages."""
STALE = "this form is no longer valid: go back, load its page again, and send it once more"


def sentence(error: TimelineError) -> str:
    """Return the sentence for an error, as the command line has it."""
    if error.code in (Status.UNKNOWN, "SUPERSEDED", "LEASE_LOST"):
        return f"{error.reason.rstrip('.') or 'the answer was lost'}; {IN_DOUBT}"
    said = sentence_of(error)
    for theirs, ours in WORDS:
        said = said.replace(theirs, ours)
    return said


class Fields:
    """The fields of a form or of a query: texts by name."""

    def __init__(self, given: Mapping[str, list[str]]) -> None:
        self._given = given

    @classmethod
    def of(cls, encoded: str) -> Fields:
        """Return the fields of a form's body, or of a query. Raise Invalid."""
        try:
            given = parse_qs(
                encoded.removeprefix("?"),
                keep_blank_values=True,
                strict_parsing=bool(encoded),
                max_num_fields=MOST_FIELDS,
            )
        except ValueError:
            raise Invalid("this form cannot be read: send it from its page") from None
        return cls(given)

    def with_(self, **texts: str) -> Fields:
        """Return the same fields with other texts."""
        return Fields({**self._given, **{name: [text] for name, text in texts.items()}})

    def text(self, name: str, default: str = "") -> str:
        """Return the text of a field without spaces around it."""
        return self._given.get(name, [default])[0].strip()

    def exact(self, name: str) -> str:
        """Return the text of a field as it was sent: a name or an id, which may begin with a space."""
        return self._given.get(name, [""])[0]

    def raw(self, name: str) -> str:
        """Return the text of a field as it was written, with the line ends of Unix."""
        return self._given.get(name, [""])[0].replace("\r\n", "\n")

    def texts(self, name: str) -> list[str]:
        """Return all texts of a field that are not empty."""
        return [one for one in self._given.get(name, []) if one]

    def number(self, name: str, default: int = 0) -> int:
        """Return a whole number. Raise Invalid."""
        said = self.text(name)
        if said and WHOLE.fullmatch(said) is None:
            raise Invalid(f"{name} must be a whole number, not {said!r:.60}")
        return int(said) if said else default

    def has(self, name: str) -> bool:
        """Return whether a box is checked, or a field is there at all."""
        return name in self._given

    def instant_ms(self, name: str) -> int | None:
        """Return a time that was picked on the clocks of `zone`. None: the field is empty. Raise Invalid."""
        said = self.text(name)
        if not said:
            return None
        try:
            picked = parse_iso(said)
        except ValueError:
            raise Invalid(f"{name} {said!r:.60} is no time: write 2030-03-29T09:00") from None
        if picked.tzinfo is None:
            picked = picked.replace(tzinfo=self.zone)
        return instant_ms(picked, name)

    @property
    def zone(self) -> ZoneInfo:
        """The time zone of the form's times: UTC if it names none. Raise Invalid."""
        name = self.text("zone") or "UTC"
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            hint = nearest_zones(name[:80]) or "write one such as Europe/Berlin, or UTC"
            raise Invalid(f"there is no time zone {name!r:.80}: {hint}") from None

    def due(self) -> dict[str, Any]:
        """Return `at=` or `in_=` for the driver. Raise Invalid unless exactly one is given."""
        return due_of(self.instant_ms("at"), self.text("in") or None)


class Visit:
    """One request of a browser, and the client of the token that its visitor logged in with."""

    def __init__(self, request: ApiRequest, client: CallerClient) -> None:
        self.request, self.client = request, client
        self.gateway: HttpGateway = gateway_of(request)
        self.timeline = client.timeline
        self.query = Fields(_listed(request))

    async def form(self) -> Fields:
        """Return the fields of the form that was sent. Raise Forbidden unless it is one of ours."""
        return await form_of(self.request)

    async def topic(self, name: str) -> Topic:
        """Return the record of a topic. Raise NotFound."""
        found = next(
            (one for one in await self.timeline.topics(internal=name.startswith("~")) if one.name == name), None
        )
        if found is None:
            raise NotFound(no_such_topic(name))
        return found

    def page(self, template: str, **values: Any) -> Response[bytes]:
        """Return a page."""
        return shown(self.request, template, **values)

    def back(self, path: str, notice: str = "") -> Response[bytes]:
        """Send the browser to a page, which shows `notice` once."""
        return redirect(self.request, path, notice)


def caller_of(request: ApiRequest) -> Caller:
    """Return who asks, by the cookies."""
    return Caller(request.cookies.get(TOKEN, ""), OPERATOR in request.cookies)


@asynccontextmanager
async def visiting(request: ApiRequest) -> AsyncIterator[Visit]:
    """Lend the client of the visitor's token. Raise what `service.serving` raises."""
    gateway = gateway_of(request)
    await gateway.check_guarded()
    async with gateway.clients.serving(caller_of(request)) as client:
        yield Visit(request, client)


def _listed(request: ApiRequest) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        found.setdefault(name, []).append(str(value))
    return found


async def form_of(request: ApiRequest) -> Fields:
    """Return the fields of a form. Raise Invalid for another body, Forbidden for a form that is not ours."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != FORM:
        raise Invalid(f"a form is sent as {FORM}, not as {kind!r:.60}")
    fields = Fields.of((await request.body()).decode(errors="replace"))
    check_csrf(request, fields)
    return fields


def check_csrf(request: ApiRequest, fields: Fields) -> None:
    """Raise Forbidden unless the form has the secret of the browser's cookie."""
    known = request.cookies.get(CSRF, "")
    if not known or not hmac.compare_digest(known.encode(), fields.text(FIELD).encode()):
        raise Forbidden(STALE)


def check_own_page(request: ApiRequest) -> None:
    """Raise Forbidden unless a page of this gateway sent the request, or a program that is no browser."""
    origin = request.headers.get("origin", "")
    site = request.headers.get("sec-fetch-site", "")
    own = (
        origin.partition("://")[2] == request.headers.get("host", "") or origin in gateway_of(request).settings.origins
    )
    if (site and site != "same-origin") or (origin and not own):
        raise Forbidden("only pages of this console may change something: open it, and use its forms")


def shown(request: ApiRequest, template: str, status: int = 200, **values: Any) -> Response[bytes]:
    """Return a page with what all pages have: the navigation, the secret of its forms, and a notice."""
    csrf = request.cookies.get(CSRF, "") or secrets.token_urlsafe(24)
    said = request.cookies.get(NOTICE, "")
    partial = "hx-request" in request.headers
    common = {
        "path": request.scope["path"],
        "csrf": csrf,
        "logged_in": TOKEN in request.cookies,
        "notice": "" if partial else said,
        "version": gateway_of(request).version,
        "now_ms": gateway_of(request).clock.now_ms(),
    }
    answer = page(template, {**common, **values}, status)
    if CSRF not in request.cookies:
        answer.cookies.append(_cookie(request, CSRF, csrf))
    if said and not partial:
        answer.cookies.append(_cookie(request, NOTICE, "", 0))
    return answer


def redirect(request: ApiRequest, path: str, notice: str = "") -> Response[bytes]:
    """Send the browser to a page, which shows `notice` once."""
    headers = {**SECURITY, "Cache-Control": "no-store"}
    status = 303
    if "hx-request" in request.headers:
        headers["HX-Redirect"], status = path, 200
    else:
        headers["Location"] = path
    answer = Response(b"", status_code=status, headers=headers)
    if notice:
        answer.cookies.append(_cookie(request, NOTICE, quote(notice[:MAX_NOTICE]), NOTICE_S))
    return answer


def log_in(request: ApiRequest, token: str, as_operator: bool, path: str) -> Response[bytes]:
    """Keep a token in the browser, and send it to a page. The secret of forms stays, so that what was written before is
    sent again as it is. The form that logged in had it, and only a page of ours can set it."""
    answer = redirect(request, path)
    answer.cookies.append(_cookie(request, TOKEN, quote(token), LOGIN_S))
    answer.cookies.append(_cookie(request, OPERATOR, "1", LOGIN_S if as_operator else 0))
    return answer


def log_out(request: ApiRequest, path: str) -> Response[bytes]:
    """Make the browser forget its token."""
    answer = redirect(request, path, "You are logged out.")
    for name in (TOKEN, OPERATOR, CSRF):
        answer.cookies.append(_cookie(request, name, "", 0))
    return answer


def _cookie(request: ApiRequest, name: str, value: str, age_s: int | None = None) -> Cookie:
    # A proxy in front of the gateway may end TLS. The browser then names the page's own origin with a form.
    secure = request.scope.get("scheme") == "https" or request.headers.get("origin", "").startswith("https://")
    return Cookie(name, value=value, path="/", max_age=age_s, secure=secure, httponly=True, samesite="strict")
