"""What an etcd:// URL may say, and what is answered to one that cannot be meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from timeline.errors import Invalid
from timeline.sync import make_membership
from timeline.sync.etcd.client import EtcdLocation, Tls, location_of

NOTHING: dict[str, str] = {}


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("etcd://h1", EtcdLocation(("h1:2379",))),
        ("etcd://h1:1,h2,[::1],[::1]:7/", EtcdLocation(("h1:1", "h2:2379", "[::1]:2379", "[::1]:7"))),
        ("etcd://h1/prod/timeline/", EtcdLocation(("h1:2379",), "prod/timeline")),
        ("etcd://u%40x:p%2F%3F@h1/a%20b?ttl=10s", EtcdLocation(("h1:2379",), "a b", "u@x", "p/?", ttl_s=10)),
        (
            "etcd://h1?ca=/ca.pem&cert=/c.pem&key=/k.pem",
            EtcdLocation(("h1:2379",), tls=Tls("/ca.pem", "/c.pem", "/k.pem")),
        ),
        ("etcd://h1?tls=0", EtcdLocation(("h1:2379",))),
    ],
)
def test_urls_that_are_understood(url: str, location: EtcdLocation) -> None:
    assert location_of(url, NOTHING) == location


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("etcd://", "sync: etcd:// needs the addresses of etcd's members, such as etcd://"),
        ("etcd:///prefix", "sync: etcd:// needs the addresses"),
        ("etcd://h1:0", "sync: 'h1:0' is no address of etcd"),
        ("etcd://h1,,h2", "sync: '' is no address of etcd"),
        ("etcd://h 1", "sync: an address is host:port"),
        ("etcd://user@h1", "sync: etcd's user is given without the password"),
        ("etcd://:secret@h1", "sync: etcd's password is given without the user"),
        ("etcd://user:se/cret@h1", "sync: a password with / or ? in it is percent-encoded"),
        ("etcd://user:se?cret@h1", "sync: a password with / or ? in it is percent-encoded"),
        ("etcd://h1/a//b", "sync: the prefix is 1 to 255 bytes"),
        (
            "etcd://h1?certs=1",
            "sync: etcd:// takes ca, cert, key, tls, ttl behind the ?, not 'certs'; did you mean cert?",
        ),
        ("etcd://h1?tls=yes", "sync: tls is 0 or 1, not 'yes'"),
        ("etcd://h1?tls=0&ca=/ca.pem", "sync: ca, cert and key are for TLS"),
        ("etcd://h1?ca=/ca.pem&cert=/c.pem", "sync: cert and key belong together"),
        ("etcd://h1?ttl=1s", "sync: ttl is whole seconds from 2 to 60"),
        ("etcd://h1?ttl=2500ms", "sync: ttl is whole seconds"),
        ("etcd://h1?ttl=soon", "sync: ttl: a duration is"),
    ],
)
def test_urls_that_cannot_be_meant(url: str, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        location_of(url, NOTHING)
    assert refused.value.reason.startswith(said)
    assert "secret" not in refused.value.reason and "cret" not in refused.value.reason.replace("secret", "")


def test_user_and_password_may_stand_in_the_environment() -> None:
    variables = {"TIMELINE_ETCD_USER": "u", "TIMELINE_ETCD_PASSWORD": "secret"}
    location = location_of("etcd://h1", variables)
    assert (location.user, location.password) == ("u", "secret")
    assert location_of("etcd://other:own@h1", variables).user == "other"


def test_a_place_shows_no_password() -> None:
    location = location_of("etcd://u:secret@h1:1,h2:2/prod", NOTHING)
    assert str(location) == "etcd://u:…@h1:1,h2:2/prod"
    assert "secret" not in repr(location) + repr(make_membership("etcd://u:secret@h1").__dict__)


def test_tls_trusts_the_systems_certificates_unless_told_otherwise(tmp_path: Path) -> None:
    tls = location_of("etcd://h1?tls=1", NOTHING).tls
    assert tls is not None and tls.ca
    with pytest.raises(Invalid, match=r"missing.pem' cannot be read: No such file"):
        Tls(str(tmp_path / "missing.pem")).check()


@pytest.mark.slow
def test_what_is_not_installed_is_named_with_the_extra_that_brings_it() -> None:
    code = "import sys; sys.modules['google.protobuf'] = None; import timeline.sync as sync; sync.make_membership('etcd://h1')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "(google.protobuf): pip install 'timeline-scheduler[etcd]'" in done.stderr
