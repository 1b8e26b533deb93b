"""The values of `format` in JSON schemas, as regular expressions of Rust that match whole texts."""

from __future__ import annotations

# --- dates and times: RFC 3339

LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{LEAP}-02-29)"
)
HOURS, MINUTES = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
FRACTION = r"(?:\.[0-9]+)?"


def _leap_seconds() -> str:
    """Times within the second before midnight in UTC, in zones of whole, half and 3/4 hours."""
    ways = [f"23:59:60{FRACTION}[zZ]"]
    for minutes in (0, 30, 45):
        for hours in range(24):
            for sign in (1, -1):
                here = (23 * 60 + 59 + sign * (60 * hours + minutes)) % 1440
                zone = f"[{'+' if sign > 0 else '-'}]{hours:02}:{minutes:02}"
                ways.append(f"{here // 60:02}:{here % 60:02}:60{FRACTION}{zone}")
    return "|".join(ways)


TIME = f"(?:{HOURS}:{MINUTES}:{MINUTES}{FRACTION}(?:[zZ]|[+-]{HOURS}:{MINUTES})|{_leap_seconds()})"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
DURATION = f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"

# --- hosts: RFC 1123, without names in punycode, since not every "xn--" is one

# A label: no hyphens at its third and fourth letter, none at its ends, 63 letters.
LABEL = (
    "(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]?[a-zA-Z0-9])?"
    "|[a-zA-Z0-9][a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])"
    "[a-zA-Z0-9-]{0,58}[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-][a-zA-Z0-9-][a-zA-Z0-9])"
)
HOST = rf"{LABEL}(?:\.{LABEL})*"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"(?:{BYTE}\.){{3}}{BYTE}"


def _ipv6() -> str:
    """Eight groups, the last two also as an IPv4; one run of groups may be left out for `::`."""
    group = "[0-9a-fA-F]{1,4}"
    last = f"(?:{group}:{group}|{IPV4})"
    ways = [f"(?:{group}:){{6}}{last}"]
    for before in range(8):
        left = f"(?:{group}(?::{group}){{{before - 1}}})?" if before else ""
        if before:
            left = f"{group}(?::{group}){{{before - 1}}}"
        after = 7 - before  # groups behind it at most, since it stands for one at least
        rights = [f"(?:{group}:){{0,{after - 1}}}{group}"] if after else []
        if after >= 2:
            rights.append(f"(?:{group}:){{0,{after - 2}}}{IPV4}")
        right = f"(?:{'|'.join(rights)})?" if rights else ""
        ways.append(f"{left}::{right}")
    return f"(?:{'|'.join(ways)})"


IPV6 = _ipv6()
ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
DOMAIN = rf"{LABEL}(?:\.{LABEL})*"
LOCAL = rf"(?:{ATOM}(?:\.{ATOM})*|{QUOTED})"
EMAIL = rf"{LOCAL}@(?:{DOMAIN}|\[(?:{IPV4}|IPv6:{IPV6})\])"
# RFC 6531 has letters beyond ASCII wherever others may stand.
PLANES = "".join(rf"\x{{{plane:x}0000}}-\x{{{plane:x}fffd}}" for plane in range(1, 15))
PRIVATE = r"\x{e000}-\x{f8ff}\x{f0000}-\x{ffffd}\x{100000}-\x{10fffd}"
WIDE = r"\x{a0}-\x{d7ff}\x{f900}-\x{fdcf}\x{fdf0}-\x{ffef}" + PLANES

# --- addresses: RFC 3986 and 3987


def _address(more: str, private: str, relative: bool) -> str:
    """`more`: letters beside those of ASCII; `private`: those of queries alone."""
    free = rf"a-zA-Z0-9\-._~!$&'()*+,;={more}"
    coded = "%[0-9a-fA-F]{2}"
    letter = f"(?:[{free}:@]|{coded})"
    user = f"(?:(?:[{free}:]|{coded})*@)?"
    future = r"[vV][0-9a-fA-F]+\.[a-zA-Z0-9\-._~!$&'()*+,;=:]+"
    host = rf"(?:\[(?:{IPV6}|{future})\]|(?:[{free}]|{coded})*)"
    rooted = f"//{user}{host}(?::[0-9]*)?(?:/{letter}*)*|/(?:{letter}+(?:/{letter}*)*)?"
    bare = f"{letter}+(?:/{letter}*)*"
    tail = rf"(?:\?(?:[{free}:@/?{private}]|{coded})*)?(?:\#(?:[{free}:@/?]|{coded})*)?"
    whole = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{rooted}|{bare})?{tail}"
    if not relative:
        return whole
    first = f"(?:[{free}@]|{coded})+(?:/{letter}*)*"  # without a colon
    return f"(?:{whole}|(?:{rooted}|{first})?{tail})"


_NAME = r"(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2})(?:\.?(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2}))*"
_VARIABLE = rf"{_NAME}(?::[1-9][0-9]{{0,3}}|\*)?"
TEMPLATE = (
    rf"(?:[!#$&-;=?-\[\]_a-z~{WIDE}{PRIVATE}]|%[0-9a-fA-F]{{2}}"
    rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
POINTER = "(?:/(?:[^~/]|~[01])*)*"

# What is checked: the regex, and the most letters.
FORMATS: dict[str, str] = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}[tT]{TIME}",
    "duration": DURATION,
    "email": EMAIL,
    "hostname": HOST,
    "ipv4": IPV4,
    "ipv6": IPV6,
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri": _address("", "", relative=False),
    "uri-reference": _address("", "", relative=True),
    "iri": _address(WIDE, PRIVATE, relative=False),
    "iri-reference": _address(WIDE, PRIVATE, relative=True),
    "uri-template": TEMPLATE,
    "json-pointer": POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:\#|{POINTER})",
}
LONGEST = {"hostname": 253}  # letters, where a format bounds them
# Formats of the standard that no regular expression says; all others are annotations.
UNCHECKED = ("regex", "idn-hostname", "idn-email")
