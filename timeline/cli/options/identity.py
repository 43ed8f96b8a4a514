"""Whom the command line asks, who it is to them, and whom it trusts: the options and variables that every command that
asks a broker takes, and the client that is made of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

import timeline
from timeline.credentials import PLAIN, Credentials, credentials_of
from timeline.driver.transport.addresses import DEFAULT_ADDRESS
from timeline.errors import Invalid

TOKEN_VARIABLE = "TIMELINE_TOKEN"
_KEPT = "timeline.credentials"
OPTIONS = (
    click.option("--tls", is_flag=True, envvar="TIMELINE_TLS", help="Encrypt; TIMELINE_TLS."),
    click.option("--tls-ca", envvar="TIMELINE_TLS_CA", metavar="FILE", help="Who signed the broker's certificate."),
    click.option("--tls-cert", envvar="TIMELINE_TLS_CERT", metavar="FILE", help="A certificate of our own, to show."),
    click.option("--tls-key", envvar="TIMELINE_TLS_KEY", metavar="FILE", help="Its key."),
    click.option(
        "--token-file", envvar="TIMELINE_TOKEN_FILE", metavar="FILE", help="Who we are; or TIMELINE_TOKEN, the token."
    ),
)
address_option = click.option(
    "--address",
    envvar="TIMELINE_ADDRESS",
    default=DEFAULT_ADDRESS,
    show_default=True,
    metavar="HOST:PORT",
    help="The broker, or several with commas; TIMELINE_ADDRESS.",
)
operator_option = click.option(
    "--as-operator", is_flag=True, help="Whatever group owns them: takes the right operator, and is logged."
)
NAMES = ("tls", "tls_ca", "tls_cert", "tls_key", "token_file")


def credential_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --tls, --tls-ca, --tls-cert, --tls-key and --token-file; what they say is kept for `connected`. A command
    that has `operator_option`, too, says so by the same way."""

    @functools.wraps(function)
    def with_credentials(**given: Any) -> Any:
        click.get_current_context().meta[_KEPT] = credentials_of_options(given)
        return function(**{name: value for name, value in given.items() if name not in (*NAMES, "as_operator")})

    for option in reversed(OPTIONS):
        with_credentials = option(with_credentials)
    return with_credentials


def credentials_of_options(given: Mapping[str, Any]) -> Credentials:
    """What the options say, and TIMELINE_TOKEN where no file is named. Raises Invalid."""
    tls, ca, cert, key, file = (given.get(name) or None for name in NAMES)
    token: str | Path | None = Path(file) if file else os.environ.get(TOKEN_VARIABLE) or None
    try:
        return credentials_of(tls, ca, cert, key, token, as_operator=bool(given.get("as_operator")))
    except Invalid as bad:
        raise Invalid(f"{bad.reason} ({_at_fault(bad.reason, file)})") from bad


def _at_fault(reason: str, token_file: str | None) -> str:
    """Which option, or variable in its place, has what `reason` complains of."""
    if reason.startswith("this is no token") and not token_file:
        return TOKEN_VARIABLE
    begins = {"the token": "token-file", "this is no token": "token-file", "the CA": "tls-ca", "the key": "tls-key"}
    begins["the certificate "] = "tls-cert"
    option = next((option for words, option in begins.items() if reason.startswith(words)), "")
    if not option:
        return "--tls-cert and --tls-key, or TIMELINE_TLS_CERT and TIMELINE_TLS_KEY"
    return f"--{option}, or TIMELINE_{option.upper().replace('-', '_')}"


def credentials() -> Credentials:
    """What the options of the command that runs now say."""
    context = click.get_current_context(silent=True)
    kept = context.meta.get(_KEPT, PLAIN) if context is not None else PLAIN
    assert isinstance(kept, Credentials)
    return kept


def connected(address: str, timeout: str) -> timeline.Timeline:
    """A client of the brokers at `address`, as whom the options of the command that runs now say."""
    return timeline.Timeline(address, timeout, credentials=credentials())
