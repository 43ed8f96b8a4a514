"""Settings of serve: where they come from, which one counts, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from timeline import config
from timeline.config import ServeConfig, load
from timeline.errors import Invalid


def test_defaults_fill_in_what_depends_on_the_machine() -> None:
    made = load(variables={})
    assert (made.listen, made.advertise, made.store) == ("127.0.0.1:9000", "127.0.0.1:9000", "sqlite:///timeline.db")
    assert made.name.rpartition("-")[2].isdigit()
    assert load(variables={}, flags={"listen": "0.0.0.0:9100"}).advertise.endswith(":9100")
    assert not load(variables={}, flags={"listen": "0.0.0.0:9100"}).advertise.startswith("0.0.0.0")


def test_flags_beat_variables_beat_the_file(tmp_path: Path) -> None:
    file = tmp_path / "timeline.toml"
    file.write_text('name = "file"\nstore = "memory://"\ngrace = "1m30s"\nmax_inflight_bytes = "16MiB"\n')
    variables = {"TIMELINE_NAME": "variable", "TIMELINE_STORE": "sqlite:///v.db"}
    made = load({"name": "flag", "store": None}, variables, file)
    assert (made.name, made.store) == ("flag", "sqlite:///v.db")
    assert (made.grace_ms, made.max_inflight_bytes) == (90_000, 16 * 1024 * 1024)


def test_a_free_port_is_advertised_once_it_is_known() -> None:
    made = load({"listen": "127.0.0.1:0"}, {})
    assert made.advertise == ""
    assert made.bound(4711).advertise == "127.0.0.1:4711"
    assert load({"listen": "[::1]:0"}, {}).bound(4711).listen == "[::1]:4711"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"listen": "nowhere"}, "--|listen: an address is host:port"),
        ({"listen": "localhost:65536"}, "port from 1 to 65535"),
        ({"advertise": "localhost:0"}, "nobody can reach port 0"),
        ({"metrics": "maybe"}, 'or "off"'),
        ({"store": "timeline.db"}, "sqlite:///timeline.db"),
        ({"sync": "etcd"}, "local://"),
        ({"grace": "soon"}, '--grace: a duration is seconds or a text such as "250ms"'),
        ({"grace": "-1s"}, "--grace"),
        ({"grace": "25h"}, "grace must be 0 to 1d, not 25h"),
        ({"log_level": "inof"}, "did you mean info?"),
        ({"log_format": "xml"}, "json, text"),
        ({"max_inflight_bytes": "12"}, "from 1048576"),
        ({"max_outbox_bytes": "1 potato"}, "--max-outbox-bytes: a size"),
        ({"max_streams": "0"}, "max_streams must be a whole number from 1"),
        ({"max_scans": "many"}, "--max-scans: a whole number is needed"),
        ({"name": "a\nb"}, "printable"),
        ({"name": "x" * 256}, "1 to 255 bytes"),
        ({"lisen": "x"}, "did you mean listen?"),
        ({"name": " "}, "1 to 255 bytes"),
        ({"name": "\udcff"}, "printable"),
        ({"log_level": "INFO"}, "did you mean info?"),
        ({"grace": "9" * 5_000}, "grace must be 0 to 1d"),
        ({"grace": "9" * 5_000 + "s"}, "grace must be"),
        ({"grace": "\u0663s"}, "--grace: a duration"),
        ({"max_outbox_bytes": "9" * 5_000}, "--max-outbox-bytes: a size"),
        ({"max_outbox_bytes": "\u0664\u0664\u0664\u0664\u0664\u0664\u0664\u0664"}, "--max-outbox-bytes: a size"),
        ({"listen": "127.0.0.1:\u0663\u0664\u0665"}, "an address is host:port"),
        ({"listen": "\udcff:9000"}, "is no host"),
        ({"listen": "a..b:9000"}, "'a..b' is no host"),
        ({"listen": "127.0.0.1\0:9000"}, "is no host"),
        ({"listen": "x" * 64 + ":9000"}, "is no host"),
        ({"metrics": "x." * 130 + "y:9000"}, "is no host"),
        ({"advertise": "[::zz]:9000"}, "IPv6 address in brackets"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: dict[str, str], said: str) -> None:
    with pytest.raises(Invalid) as refused:
        load(flags, {})
    assert said.removeprefix("--|") in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('stor = "memory://"', "did you mean store?"),
        ("xyzzy = 1", "there are: listen, advertise"),
        ("store = 7", "store: a text is needed, not 7"),
        ("grace = true", "grace: a duration"),
        ("store = ", "is not TOML"),
        ("\x00", "is not TOML"),
        ("name = " + "[" * 20_000, "is nested too deeply"),
        ("name = " + "{a=" * 3_000, "is nested too deeply"),
        ("grace = " + "9" * 5_000, "is not TOML: Exceeds the limit"),
        ("grace = " + "9" * 4_000, "grace: a duration"),
        ("grace = 1e308", "grace: a duration"),
        ("#" * 1_100_000, "more than 1048576 bytes"),
        ('[serve]\nstore = "memory://"', "there is no section [serve]"),
        ('STORE = "memory://"', "did you mean store?"),
        ('TIMELINE_STORE = "memory://"', "did you mean store?"),
        ("x" * 100_000 + " = 1", "is no setting"),
    ],
)
def test_a_file_is_refused_by_name_and_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(Invalid) as refused:
        load({}, {}, file)
    assert said in str(refused.value)
    assert "bad.toml" in str(refused.value)


@pytest.mark.parametrize(("content", "said"), [(b'name = "\xe9"', "UTF-8"), ("name = 1".encode("utf-16"), "UTF-8")])
def test_a_file_of_another_encoding_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(Invalid, match=said):
        load({}, {}, file)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "marked.toml"
    file.write_bytes(b'\xef\xbb\xbfname = "marked"')
    assert load({}, {}, file).name == "marked"


def test_sentences_about_a_file_stay_short(tmp_path: Path) -> None:
    file = tmp_path / "long.toml"
    file.write_text("x" * 100_000 + " = 1")
    for name in (file, Path("y" * 5_000), Path("nul\0")):
        with pytest.raises(Invalid) as refused:
            load({}, {}, name)
        assert len(str(refused.value)) < 600


def test_what_never_ends_is_no_file() -> None:
    with pytest.raises(Invalid, match="more than 1048576 bytes"):
        load({}, {}, "/dev/zero")
    with pytest.raises(Invalid, match="--config needs the name of a file"):
        load({}, {}, "")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read: No such file"):
        load({}, {}, tmp_path / "none.toml")


def test_a_mistyped_variable_is_refused_and_a_strange_one_left_alone() -> None:
    with pytest.raises(Invalid, match="TIMELINE_STROE is no setting; did you mean TIMELINE_STORE"):
        load({}, {"TIMELINE_STROE": "memory://"})
    # A cluster's service discovery sets variables such as these for a service named timeline.
    strange = {"TIMELINE_PORT_9000_TCP_ADDR": "10.0.0.1", "TIMELINE_SERVICE_HOST": "10.0.0.1", "TIMELINE_ADDRESS": "x"}
    assert load({}, strange).listen == "127.0.0.1:9000"


def test_a_variable_with_a_bad_value_is_named() -> None:
    with pytest.raises(Invalid, match="TIMELINE_GRACE: a duration"):
        load({}, {"TIMELINE_GRACE": "soon"})


@pytest.mark.parametrize(
    ("value", "ms"), [("250ms", 250), ("1h30m", 5_400_000), (0.25, 250), (2, 2_000), ("2", 2_000), ("0.0001", 1)]
)
def test_durations(value: object, ms: int) -> None:
    assert config.parse_duration_ms(value) == ms


@pytest.mark.parametrize("value", ["", "m", "1x", "1m 2", float("nan"), float("inf"), -1, True, None, "1m-2s"])
def test_no_durations(value: object) -> None:
    with pytest.raises(Invalid):
        config.parse_duration_ms(value)


def test_check_judges_a_configuration_made_by_hand() -> None:
    with pytest.raises(Invalid, match="grace must be 0 to 1d, not -1ms"):
        ServeConfig(grace_ms=-1).check()
    with pytest.raises(Invalid, match="address"):
        ServeConfig(listen=9000).check()  # type: ignore[arg-type]
