"""Membership: which brokers exist, and which buckets each dispatches. `local://` is one broker by itself."""

from __future__ import annotations

import difflib

from timeline.errors import Invalid
from timeline.sync.membership import JoinState, Member, Membership, MembershipChange, MembershipRefused, MembershipState
from timeline.sync.view import LocalMembership
from timeline.wording import install_command

SCHEMES = ("etcd", "local")


def make_membership(url: str) -> Membership:
    """Return the membership for `url`, not started yet. Raise Invalid for an unknown scheme (with the nearest known
    one), a wrong URL, or a missing package (with the extra to install)."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        scheme = scheme.partition(":")[0]  # what follows may hold a password
        near = difflib.get_close_matches(scheme, SCHEMES, n=1)
        hint = f" Did you mean {near[0]}://?" if near else ""
        raise Invalid(
            f"sync {scheme!r:.40} is not known; use one of {', '.join(f'{name}://' for name in SCHEMES)}.{hint}"
        )
    if scheme == "etcd":
        return _etcd(url)
    if rest:
        raise Invalid(f"local:// takes nothing behind it, not {rest!r:.80}")
    return LocalMembership()


def _etcd(url: str) -> Membership:
    """Import it on first use: a broker by itself needs none of it."""
    try:
        from timeline.sync.etcd import EtcdMembership
    except ImportError as missing:
        raise Invalid(
            f"etcd:// needs a package that is not installed ({missing.name or missing}): {install_command('etcd')}"
        ) from missing
    return EtcdMembership(url)


__all__ = [
    "JoinState",
    "Member",
    "Membership",
    "MembershipChange",
    "MembershipRefused",
    "MembershipState",
    "make_membership",
]
