"""The settings of `timeline serve`: flags beat TIMELINE_* variables beat the configuration file beat the defaults.

A setting has one name everywhere: `--max-inflight-bytes`, `TIMELINE_MAX_INFLIGHT_BYTES`, and `max_inflight_bytes = …`
in the TOML file. An impossible value is refused with its place and the allowed values. A mistyped name gets the nearest
one.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import itertools
import math
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from timeline.errors import Invalid
from timeline.files import read_file
from timeline.wording import out_of_range, typed_name

MIB = 1024 * 1024
TIB = 1024 * 1024 * MIB
PREFIX = "TIMELINE_"
NOT_OF_SERVE = (
    "TIMELINE_ADDRESS",
    "TIMELINE_CONFIG",
    "TIMELINE_OUTBOX",
    "TIMELINE_REQUIRE_SERVICES",
    "TIMELINE_TLS",
    "TIMELINE_TOKEN",
)
"""TIMELINE_* variables that somebody else reads."""

_MOST_S = 1e12
"""Durations are cut here, far above every limit and far below where numbers end."""
_UNITS_MS = {"ms": 1.0, "s": 1e3, "m": 60e3, "h": 3600e3, "d": 86400e3}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)\s*")
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Hosts that stand for all addresses of a machine, and the one by which the machine reaches itself."""
_SWITCHES = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_PASSWORD = re.compile(r"://[^/?#@\s]*:[^/?#@\s]+@")
_SECRET_OPTION = re.compile(r"[?&][a-z0-9_-]*(password|passwd|secret|token)[a-z0-9_-]*=[^&]", re.IGNORECASE)
MAX_URL_BYTES = 65_536
MAX_FILE_BYTES = MIB
"""A configuration file that is larger is none."""
_MAX_DIGITS = 30
"""Longer numbers are above every limit, and Python takes long over them or refuses to read them."""


def _setting(default: object, takes: str, does: str, *, least: int = 0, most: int = 0, shown: str = "") -> Any:
    """Declare a setting of serve: what people write (`takes` chooses the parser), and what it does. A number has a
    range. `shown`: the default in help, if it is not the value itself."""
    return field(default=default, metadata={"takes": takes, "does": does, "range": (least, most), "shown": shown})


HTTP = "127.0.0.1:9080"
"""Where HTTP is served beside a broker that listens on its own default address."""
URL, DURATION, SIZE, COUNT, SWITCH = "URL|@FILE", "DURATION", "SIZE", "COUNT", ""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The settings of one broker."""

    listen: str = _setting("127.0.0.1:9000", "HOST:PORT", "Address for drivers; port 0 takes a free one.")
    advertise: str = _setting("", "HOST:PORT", "Address at which others reach the broker.", shown="from --listen")
    name: str = _setting("", "TEXT", "Name in logs, metrics and the cluster.", shown="host-pid")
    store: str = _setting("sqlite:///timeline.db", URL, "Store of the messages.")
    sync: str = _setting("local://", URL, "Membership backend, where brokers meet.")
    metrics: str = _setting("127.0.0.1:9001", "HOST:PORT|off", "Address of /metrics, /healthz and /readyz.")
    grace_ms: int = _setting(30_000, DURATION, "Longest drain after SIGTERM.", most=86_400_000)
    log_level: str = _setting("info", "debug|info|warning|error", "Least severe level that is logged.")
    log_format: str = _setting("text", "json|text", "Log lines for machines or for people.")
    # Payload bytes; past the first, producers are answered THROTTLED.
    max_inflight_bytes: int = _setting(64 * MIB, SIZE, "Messages waiting for the store.", least=MIB, most=TIB)
    max_outbox_bytes: int = _setting(128 * MIB, SIZE, "Deliveries waiting for consumers.", least=MIB, most=TIB)
    # Past these two a new one is refused, RESOURCE_EXHAUSTED.
    max_streams: int = _setting(10_000, COUNT, "Streams of producers and consumers at once.", least=1, most=1_000_000)
    max_streams_per_peer: int = _setting(5_000, COUNT, "Streams of one host at once.", least=1, most=1_000_000)
    max_scans: int = _setting(64, COUNT, "Scans under way at once.", least=1, most=10_000)
    metrics_topics: int = _setting(200, COUNT, "Topics that metrics name; the rest are summed.", most=100_000)
    tls_cert: str = _setting("", "FILE", "Certificate of this broker, PEM: the port speaks TLS.", shown="none")
    tls_key: str = _setting("", "FILE", "Key of that certificate, PEM.", shown="none")
    client_ca: str = _setting("", "FILE", "Authorities whose clients are let in (mutual TLS).", shown="anybody's")
    tokens: str = _setting("", "FILE", "Tokens of callers. Each call needs one.", shown="none asked for")
    insecure: bool = _setting(False, SWITCH, "Listen beyond this machine without TLS or tokens.")
    tls_ca: str = _setting("", "FILE", "Authorities that signed other brokers' certificates.", shown="this machine's")
    token_file: str = _setting("", "FILE", "Token that this broker shows to other brokers.", shown="none")
    workers: int = _setting(1, COUNT, "Brokers, as processes behind one port.", least=1, most=64)
    http: str = _setting(
        "", "HOST:PORT|off", "Address of HTTP, by a gateway beside the broker.", shown=f"{HTTP} beside the default port"
    )
    push_allow: str = _setting("", "CIDR", "Private networks that its webhooks may reach, with commas.", shown="none")
    push_token_file: str = _setting("", "FILE", "Token for its webhooks: rights admin and consume.", shown="none")
    journal: str = _setting("", URL, "Event journal: what happens to each message.", shown="nowhere")

    def check(self) -> ServeConfig:
        """Return itself, with `name` filled in by the machine, and `advertise` unless `listen` asks for a free port
        (`bound` fills it in then). Raise Invalid with a sentence for the first impossible value."""
        _, port = check_address("listen", self.listen, free_port=True)
        if self.advertise:
            check_address("advertise", self.advertise)
        name = self.name or f"{socket.gethostname()}-{os.getpid()}"
        if not name.isprintable() or not name.strip() or len(name.encode()) > 255:
            raise Invalid(f"name must be 1 to 255 bytes of printable characters, not {name!r:.80}")
        for url in ("store", "sync", *(["journal"] if self.journal else [])):
            _check_url(url, getattr(self, url))
        if self.metrics != "off":
            check_address("metrics", self.metrics, free_port=True, otherwise='or "off"')
        if self.http not in ("", "off"):
            check_address("http", self.http, free_port=True, otherwise='or "off"')
        self._check_ports()
        for network in self.push_networks:
            network_of("push_allow", network)
        self._check_security()
        for setting in dataclasses.fields(self):
            value, (low, high) = getattr(self, setting.name), setting.metadata["range"]
            if setting.name.startswith("log_"):
                _check_choice(setting.name, value, tuple(setting.metadata["takes"].split("|")))
            elif high and (not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high):
                raise Invalid(out_of_range(setting.name, low, high, value))
        named = dataclasses.replace(self, name=name)
        return named.bound(port) if port else named

    @property
    def push_networks(self) -> tuple[str, ...]:
        """The networks of `push_allow`."""
        return tuple(filter(None, map(str.strip, self.push_allow.split(","))))

    def _check_ports(self) -> None:
        told = {name: getattr(self, name) for name in ("listen", "metrics", "http")}
        ports = {name: split_address(address) for name, address in told.items() if address not in ("", "off")}
        for (one, (host, port)), (name, (other, its)) in itertools.combinations(ports.items(), 2):
            same = host == other or (is_loopback(host) and is_loopback(other)) or {host, other} & set(_WILDCARDS)
            if port and port == its and same:
                raise Invalid(f"{one} and {name} are both port {port}: give {name} another one, or say {name} off")

    def _check_security(self) -> None:
        if not isinstance(self.insecure, bool):
            raise Invalid(f"insecure must be true or false, not {self.insecure!r:.80}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise Invalid("tls_cert and tls_key belong together: give both, or neither")
        if self.client_ca and not self.tls_cert:
            raise Invalid("client_ca asks clients for certificates, which takes TLS: give tls_cert and tls_key, too")

    def bound(self, port: int) -> ServeConfig:
        """Return the same, listening on `port` (the system's choice if `listen` asked for port 0)."""
        host, _ = split_address(self.listen)
        reached = socket.gethostname() if host in _WILDCARDS else host
        return dataclasses.replace(self, listen=joined(host, port), advertise=self.advertise or joined(reached, port))


def joined(host: str, port: int) -> str:
    """Return the address that `split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(listen: str) -> str:
    """Return where this machine reaches what listens on `listen`."""
    host, port = split_address(listen)
    return joined(_WILDCARDS.get(host, host), port)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[v6]:port`. Raise Invalid."""
    match = re.fullmatch(r"(?:\[([^\s\[\]]+)\]|([^\s:\[\]/]*)):([0-9]{1,5})", address)
    if match is None or int(match[3]) > 65_535:
        raise Invalid(f"an address is host:port, port from 1 to 65535, such as 127.0.0.1:9000, not {address!r:.80}")
    host = match[1] or match[2] or ""
    if not (is_ipv6(host) if match[1] else is_host(host) or not host):
        raise Invalid(f"{host!r:.80} is no host: give a name, 127.0.0.1, or an IPv6 address in brackets, [::1]")
    return host, int(match[3])


def is_host(name: str) -> bool:
    """Return whether `name` can be looked up: up to 253 bytes in labels of 1 to 63, or what IDNA makes such."""
    try:
        encoded = name.encode("ascii" if name.isascii() else "idna")
    except UnicodeError:
        return False
    labels = encoded.removesuffix(b".").split(b".")
    return name.isprintable() and len(encoded) <= 253 and all(1 <= len(label) <= 63 for label in labels)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_ipv6(text: str) -> bool:
    """Return whether `text` is an IPv6 address, with its zone or without."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def check_address(field: str, address: object, *, free_port: bool = False, otherwise: str = "") -> tuple[str, int]:
    """Return a possible host and port. `free_port`: port 0 is allowed. Raise Invalid naming `field`."""
    try:
        if not isinstance(address, str):
            raise Invalid(f"an address is a string such as 127.0.0.1:9000, not {address!r:.80}")
        host, port = split_address(address)
    except Invalid as bad:
        raise Invalid(f"{field}: {bad.reason}" + (f", {otherwise}" if otherwise else "")) from None
    if not port and not free_port:
        raise Invalid(f"{field}: nobody can reach port 0; name a port from 1 to 65535")
    return host, port


def listening(address: str, backlog: int = 1) -> socket.socket:
    """Return a socket that listens on `address`. Raise OSError with the system's reason, its `filename` the address."""
    host, port = split_address(address)
    try:
        kind, *_, found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # With its protocol: asyncio sends small parts of an answer at once (TCP_NODELAY) on such sockets alone.
        made = socket.socket(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(found)
            made.listen(backlog)
        except BaseException:
            made.close()
            raise
        return made
    except OSError as taken:
        raise OSError(taken.errno, taken.strerror, address) from taken


_EXAMPLES = {"store": "sqlite:///timeline.db", "sync": "local://", "journal": "file:///var/lib/timeline/journal"}


def network_of(field: str, text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Return a network in CIDR notation. Raise Invalid, naming `field`."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as bad:
        raise Invalid(f"{field} takes networks such as 10.1.0.0/16, not {text!r:.60}: {bad}") from bad


def _check_url(field: str, value: object) -> None:
    if not isinstance(value, str) or not _URL.match(value):
        example = _EXAMPLES[field]
        near = _meant_url(value) if field == "store" and isinstance(value, str) else ""
        said = without_password(value) if isinstance(value, str) else value
        raise Invalid(f"{field} is a URL such as {example}, not {said!r:.80}{near and f'; did you mean {near}?'}")


def _meant_url(text: str) -> str:
    """Return the store that was probably meant by a file, or by too few slashes. Empty: unknown."""
    file = re.fullmatch(r"(?:sqlite:/*)?([^:]+\.(?:db|sqlite3?))", text)
    if file is not None:
        return f"sqlite:///{file[1]}"
    return "memory://" if text.rstrip(":/") == "memory" else ""


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise Invalid(f"{field} must be one of {', '.join(allowed)}, not {value!r:.80}{did_you_mean(value, allowed)}")


def did_you_mean(word: object, known: tuple[str, ...] | list[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean …?` for the nearest of `known`, or nothing."""
    spelt = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(word)[:80].lower(), spelt, n=1, cutoff=cutoff)
    return f"; did you mean {spelt[near[0]]}?" if near else ""


def parse_duration_ms(value: object) -> int:
    """Return milliseconds of "250ms", "15m", "1h30m", or a number of seconds. Raise Invalid."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _MOST_S:
        return math.ceil(value * 1000)
    if isinstance(value, str):
        text = value.strip()
        parts = _DURATION.findall(text)
        if parts and _DURATION.sub("", text) == "":
            return math.ceil(min(_MOST_S * 1000, sum(float(number) * _UNITS_MS[unit] for number, unit in parts)))
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
            return math.ceil(min(_MOST_S, float(text)) * 1000)
    raise Invalid(f'a duration is seconds or a text such as "250ms", "30s", "15m" or "1h30m", not {value!r:.80}')


def parse_bytes(value: object) -> int:
    """Return bytes of 1048576, "64MiB" or "1GiB". Raise Invalid."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(rf"\s*([0-9]{{1,{_MAX_DIGITS}}})\s*(|B|KiB|MiB|GiB)\s*", value)
        if match:
            return int(match[1]) * {"": 1, "B": 1, "KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}[match[2]]
    raise Invalid(f'a size is a number of bytes or a text such as "64MiB" or "1GiB", not {value!r:.80}')


def parse_count(value: object) -> int:
    """Return a whole number, given as such or as text. Raise Invalid."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
        return int(value)
    raise Invalid(f"a whole number is needed, such as 1000, not {value!r:.80}")


def parse_url(value: object) -> str:
    """Return a URL, or the one in FILE, for "@FILE". Raise Invalid."""
    if not isinstance(value, str):
        raise Invalid(f"a text is needed, not {value!r:.80}")
    if not value.startswith("@"):
        return value.strip()
    try:
        url = read_file(value[1:], "file with a URL", MAX_URL_BYTES, once=True).decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise Invalid(f"the file {value[1:]!r:.200} is not text in UTF-8") from None
    if not _URL.match(url) or len(url.splitlines()) > 1:  # said without it: it may be a password alone
        raise Invalid(f"the file {value[1:]!r:.200} must have one line, a URL")
    return url


def has_password(url: str) -> bool:
    """Return whether a URL holds a password, or a secret among its options."""
    return bool(_PASSWORD.search(unquote(url)) or _SECRET_OPTION.search(url))


def without_password(url: str) -> str:
    """Return `url`, whatever it is, without what may be a user, a password or an option."""
    _, at, rest = url.rpartition("@")
    return f"{'…@' if at else ''}{rest.partition('?')[0]}"


def parse_switch(value: object) -> bool:
    """Return true or false, given as such or as text. Raise Invalid."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _SWITCHES:
        return _SWITCHES[value.strip().lower()]
    raise Invalid(f"true or false is needed, not {value!r:.80}")


_PARSERS: dict[str, Callable[[object], object]] = {
    URL: parse_url,
    SWITCH: parse_switch,
    DURATION: parse_duration_ms,
    SIZE: parse_bytes,
    COUNT: parse_count,
}
_FIELDS = {typed_name(each.name): each for each in dataclasses.fields(ServeConfig)}
SETTINGS = tuple(_FIELDS)
"""The names of all settings as people write them."""


def load(
    flags: Mapping[str, object] | None = None,
    variables: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> ServeConfig:
    """Return the checked configuration. `flags`: settings by name, None if not given. `variables`: the environment
    (default: the process's). `file`: TOML.

    Raise Invalid with the place and the allowed values.
    """
    merged: dict[str, object] = {}
    if file is not None:
        if not str(file):
            raise Invalid("--config needs the name of a file")
        merged.update(_from_file(Path(file)))
    merged.update(_from_variables(os.environ if variables is None else variables))
    for name, value in (flags or {}).items():
        if name not in SETTINGS:
            raise Invalid(f"--{name.replace('_', '-')} is no setting of serve{did_you_mean(name, SETTINGS)}")
        if value is not None:
            merged[_FIELDS[name].name] = _parsed(name, value, f"--{name.replace('_', '-')}")
    return ServeConfig(**merged).check()  # type: ignore[arg-type]


def _parsed(name: str, value: object, where: str) -> object:
    parser = _PARSERS.get(_FIELDS[name].metadata["takes"])
    try:
        if parser is not None:
            return parser(value)
        if not isinstance(value, str):
            raise Invalid(f"a text is needed, not {value!r:.80}")
    except Invalid as bad:
        raise Invalid(f"{where}: {bad.reason}") from None
    return value


def _from_file(path: Path) -> dict[str, object]:
    settings: dict[str, object] = {}
    for key, value in _read_toml(path).items():
        if key not in SETTINGS and isinstance(value, dict):
            raise Invalid(f"{path}: settings stand at the top, as name = value; there is no section [{key:.80}]")
        if key not in SETTINGS:
            near = did_you_mean(key.lower().removeprefix(PREFIX.lower()), SETTINGS)
            raise Invalid(f"{path}: {key!r:.80} is no setting{near or '; there are: ' + ', '.join(SETTINGS)}")
        settings[_FIELDS[key].name] = _parsed(key, value, f"{path}: {key}")
    return settings


def _read_toml(path: Path) -> dict[str, object]:
    about = f"the configuration file {str(path)!r:.200}"
    content = read_file(path, "configuration file", MAX_FILE_BYTES, once=True)
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as bad:
        raise Invalid(f"{about} is not TOML: save it as UTF-8 (byte {bad.start} is none)") from bad
    except RecursionError as deep:
        raise Invalid(f"{about} is not TOML for a broker: it is nested too deeply") from deep
    except ValueError as bad:  # TOMLDecodeError, and a number of thousands of digits
        raise Invalid(f"{about} is not TOML: {str(bad).partition(';')[0]}") from bad


def _from_variables(variables: Mapping[str, str]) -> dict[str, object]:
    known = {PREFIX + name.upper(): name for name in SETTINGS}
    settings: dict[str, object] = {}
    for variable, value in variables.items():
        if variable in known:
            name = known[variable]
            settings[_FIELDS[name].name] = _parsed(name, value, variable)
        elif variable.startswith(PREFIX) and variable not in NOT_OF_SERVE:
            # Others may well use the prefix (a cluster's service discovery does), but a slip of the pen must not
            # silently mean the default.
            near = did_you_mean(variable.removeprefix(PREFIX), [name.upper() for name in SETTINGS], cutoff=0.8)
            if near:
                raise Invalid(f"the variable {variable} is no setting{near.replace('mean ', 'mean ' + PREFIX)}")
    return settings
