"""Why bytes are refused as a frame."""

from __future__ import annotations

from timeline.errors import Invalid


class WireError(Invalid):
    """The bytes are no frame that this side may use; the sentence says what is wrong. Nothing of it was used."""

    advice = "the frame is damaged, or was not made by a Timeline driver or broker"


class WireVersionError(WireError):
    """The peer speaks another major version of the wire; the sentence says which side to upgrade."""


class UnknownFrame(WireError):
    """A sound frame of a newer minor whose kind this side does not know: on a stream it is passed over."""
