"""`timeline gateway`: HTTP for everyone, in front of one or more brokers."""

from __future__ import annotations

import asyncio
import errno
import json
import os

import click

import timeline
from timeline.cli.app import DONE, REFUSED, Failed, needing, say
from timeline.cli.options import DURATION, check_addresses
from timeline.config import HTTP
from timeline.credentials import credentials_of
from timeline.driver.times import duration_ms
from timeline.driver.transport.addresses import DEFAULT_ADDRESS

BESIDE_NICENESS = 10
"""How much nicer a gateway is than the broker that started it. A busy gateway would delay that broker's deliveries."""
LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("json", "text")


@click.command()
@click.option(
    "--broker",
    default=DEFAULT_ADDRESS,
    metavar="HOST:PORT",
    envvar="TIMELINE_ADDRESS",
    help="Address of a broker, or of several, with commas. Variable: TIMELINE_ADDRESS.",
)
@click.option("--listen", default=HTTP, metavar="HOST:PORT", help="Address for HTTP; port 0 takes a free one.")
@click.option("--tls-cert", metavar="FILE", help="Certificate of the gateway, PEM: the port speaks HTTPS.")
@click.option("--tls-key", metavar="FILE", help="Key of that certificate, PEM.")
@click.option("--broker-tls", is_flag=True, help="Encrypt connections to brokers.")
@click.option("--broker-ca", metavar="FILE", help="Authority that signed the brokers' certificates.")
@click.option("--broker-cert", metavar="FILE", help="Certificate of the gateway, for brokers that ask for one.")
@click.option("--broker-key", metavar="FILE", help="Key of that certificate.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS or tokens.")
@click.option("--origin", "origins", multiple=True, metavar="ORIGIN", help="Origin whose pages may call; repeatable.")
@click.option("--push/--no-push", "pushing", default=True, help="Send webhooks of topics with a push_url, or do not.")
@click.option("--push-token-file", metavar="FILE", help="Token for webhooks, with the rights admin and consume.")
@click.option("--push-allow", "allowed", multiple=True, metavar="CIDR", help="Private network that webhooks may reach.")
@click.option("--grace", default="30s", type=DURATION, help="Longest time for requests under way after SIGTERM.")
@click.option("--log-level", default="info", type=click.Choice(LEVELS), help="Least severe level that is logged.")
@click.option("--log-format", default="json", type=click.Choice(FORMATS), help="Log lines for machines or for people.")
@click.option("--until-input-ends", is_flag=True, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON object.")
def gateway(
    broker: str, listen: str, tls_cert: str | None, tls_key: str | None, broker_tls: bool, broker_ca: str | None,
    broker_cert: str | None, broker_key: str | None, insecure: bool, origins: tuple[str, ...],
    pushing: bool, push_token_file: str | None, allowed: tuple[str, ...], grace: str, log_level: str,
    log_format: str, as_json: bool, until_input_ends: bool,
) -> int:  # fmt: skip
    """Run a gateway until SIGTERM: Timeline over HTTP, for any language.

    It keeps no state: run as many as wanted. Callers' tokens are passed on, and brokers decide what they may do. Logs
    go to standard error, one line per request. /docs shows all calls.

    \b
    Example:
      timeline gateway --broker broker-1:9000,broker-2:9000
      curl -d '{"payload": "gate closes", "in": "10s"}' \\
        -H 'Content-Type: application/json' \\
        http://127.0.0.1:9080/v1/topics/departures/messages
    """
    if until_input_ends:
        os.nice(BESIDE_NICENESS)  # of this thread, and of those that it starts
    check_addresses(broker)
    with needing("gateway", "the gateway needs"):
        from timeline.gateway.process import run
        from timeline.gateway.push.pusher import WebhookPart
        from timeline.gateway.service import GatewaySettings
    settings = GatewaySettings(
        listen=listen,
        brokers=broker,
        credentials=credentials_of(broker_tls or None, broker_ca, broker_cert, broker_key),
        tls_cert=tls_cert or "",
        tls_key=tls_key or "",
        insecure=insecure,
        origins=origins,
        grace_ms=duration_ms(grace, "--grace"),
        log_level=log_level,
        log_format=log_format,
    ).check()
    webhooks = WebhookPart(broker, settings.credentials, push_token_file or "", allowed, settings.grace_ms)
    if settings.exposed and not settings.tls_cert and not insecure:
        raise Failed(
            REFUSED,
            f"other machines reach {listen}, and there is no TLS (--tls-cert, --tls-key). Give it, listen on "
            "127.0.0.1, or say --insecure where the network itself keeps strangers out.",
        )

    def announce(address: str) -> None:
        if as_json:
            say(json.dumps({"listen": address, "brokers": broker}))
        else:
            say(f"timeline {timeline.__version__} serves HTTP on {address} for {broker}")

    try:
        parts = (webhooks,) if pushing else ()
        asyncio.run(run(settings, timeline.__version__, announce, parts, until_input_ends=until_input_ends))
    except OSError as refused:
        if refused.filename != listen:
            raise
        raise _not_listening(refused) from refused
    return DONE


def _not_listening(refused: OSError) -> Failed:
    """Return the error for an address that cannot be had."""
    if refused.errno == errno.EADDRINUSE:
        return Failed(
            REFUSED,
            f"{refused.filename} is taken, perhaps by the gateway that 'timeline serve' starts. Give another: "
            "--listen HOST:PORT.",
        )
    return Failed(REFUSED, f"cannot listen on {refused.filename}: {(refused.strerror or '').lower()}.")
