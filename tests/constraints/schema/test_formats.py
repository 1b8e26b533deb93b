"""Formats of JSON schemas, by texts that are of them and texts that are not."""

from __future__ import annotations

import json
import re

import pytest

from foretell.constraints.schema.formats import FORMATS
from tests.schemas import compiled, takes

TEXTS = {
    "date": ("2020-02-29 2000-02-29 2021-12-31", "2021-02-29 1900-02-29 2021-04-31 2021-13-01"),
    "time": (
        "23:59:59Z 00:00:00.5+23:59 23:59:60Z 15:59:60-08:00 05:29:60+05:30",
        "25:61:00Z 24:00:00Z 12:00:00 12:00Z 22:59:60Z 23:59:60+01:00 12:60:00Z 1:00:00Z",
    ),
    "date-time": (
        "2020-02-29T12:00:00Z 1998-12-31T23:59:60Z 2020-01-01t00:00:00z",
        "2021-02-29T12:00:00Z 2020-02-29 2020-02-29T24:00:00Z 2020-02-29T12:00:00+24:00",
    ),
    "duration": ("P1D PT1H P1Y2M3DT4H5M6S P2W", "P PT1D P1Y2W 1D PT P1D2H P1YT"),
    "email": ("a.b@c.de a@[127.0.0.1] a@[IPv6:::1]", ".a@c.de a..b@c.de a@-b.c a@b_c a@"),
    "hostname": (
        f"a.b-c.D 1.2 localhost {'a' * 63}.b",
        f"a_b -a a- a..b a.b. xn--X ab--cd {'a' * 64}.b {('a' * 62 + '.') * 4}abcdef é.de",
    ),
    "ipv4": ("127.0.0.1 255.255.255.255", "01.0.0.1 256.0.0.1 1.2.3 1.2.3.4.5 \u0661.2.3.4"),
    "ipv6": (
        "::1 1::d6:192.168.0.1 :: 1:2:3:4:5:6:7:8 1:2:3:4:5:6:7:: ::ffff:1.2.3.4 1::8",
        "12345:: 1:2:3:4:5:6:7 1::2::3 ::1.2.3 1:2:3:4:5:6:7:8:9 1:2:3:4:5:6:7:8:: :::1 ::01.2.3.4",
    ),
    "uuid": (
        "2eb8aa08-aa98-11ea-b4aa-73b441d16380 2EB8AA08-AA98-11EA-B4AA-73B441D16380",
        "2eb8aa08aa9811eab4aa73b441d16380 2eb8aa08-aa98-11ea-b4aa-73b441d1638g {2eb8aa08}",
    ),
    "uri": (
        "http://a.b/c?d=e#f urn:a:b mailto:a@b.c http://[::1]:80/ a:/b/%20",
        "//a.b/c a b:\\\\c http://a.b/{c} http://[1::2::3]/ :a 1a:b http://a.b/%2 http://é.de",
    ),
    "uri-reference": ("/a ?b #c a/b:c //a.b http://a.b", "\\\\a 1:2 a#b#c a^b /é"),
    "iri": ("http://é.de/ü?x=1", "//é.de http://a.b/{c}"),
    "iri-reference": ("/é #ü", "\\\\é a#b#c"),
    "uri-template": ("a{b}c {?x*,y:3} {/a%20b}", "a{b a}b {} {a:0} {a,} {#}"),
    "json-pointer": ("/a/b /a~1b~0 /", "a /~2 /~ #/a"),
    "relative-json-pointer": ("0 1/a 0#", "/a 01 -1 a"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_takes_its_texts_alone(name: str) -> None:
    good, bad = (some.split(" ") for some in TEXTS[name])
    if name == "email":
        good.append('"a b"@c.de')
    start = compiled({"format": name})
    assert [text for text in good if not takes(start, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in bad if takes(start, json.dumps(text, ensure_ascii=False))] == []
    assert takes(start, "3"), "formats speak of texts"


def test_leap_seconds_are_those_of_utc() -> None:
    time = re.compile(FORMATS["time"])
    for zone in ("+05:45", "-03:30", "+14:00", "-11:00", "+00:00"):
        hours, minutes = int(zone[1:3]), int(zone[4:])
        away = (60 * hours + minutes) * (1 if zone[0] == "+" else -1)
        right = (23 * 60 + 59 + away) % 1440
        taken = [
            here for here in range(1440)
            if time.fullmatch(f"{here // 60:02}:{here % 60:02}:60{zone}")
        ]  # fmt: skip
        assert taken == [right], zone
