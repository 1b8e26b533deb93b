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
    """Matches times within the second before midnight in UTC, in zones of whole, half and 3/4
    hours.
    """
    time_patterns = [f"23:59:60{FRACTION}[zZ]"]
    for minutes in (0, 30, 45):
        for hours in range(24):
            for sign in (1, -1):
                local_minute = (23 * 60 + 59 + sign * (60 * hours + minutes)) % 1440
                zone = f"[{'+' if sign > 0 else '-'}]{hours:02}:{minutes:02}"
                time_patterns.append(
                    f"{local_minute // 60:02}:{local_minute % 60:02}:60{FRACTION}{zone}"
                )
    return "|".join(time_patterns)


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


def _ipv6_pattern() -> str:
    """Matches eight groups, the last two also as an IPv4; one run of groups may be left out for
    `::`.
    """
    group = "[0-9a-fA-F]{1,4}"
    last_groups = f"(?:{group}:{group}|{IPV4})"
    address_patterns = [f"(?:{group}:){{6}}{last_groups}"]
    for left_count in range(8):
        left_groups = f"(?:{group}(?::{group}){{{left_count - 1}}})?" if left_count else ""
        if left_count:
            left_groups = f"{group}(?::{group}){{{left_count - 1}}}"
        right_count = 7 - left_count  # groups after it at most, since it stands for one at least
        right_options = [f"(?:{group}:){{0,{right_count - 1}}}{group}"] if right_count else []
        if right_count >= 2:
            right_options.append(f"(?:{group}:){{0,{right_count - 2}}}{IPV4}")
        right_groups = f"(?:{'|'.join(right_options)})?" if right_options else ""
        address_patterns.append(f"{left_groups}::{right_groups}")
    return f"(?:{'|'.join(address_patterns)})"


IPV6 = _ipv6_pattern()
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


def _address_pattern(extra_letters: str, private: str, relative: bool) -> str:
    """Matches an address. `extra_letters`: letters beside those of ASCII; `private`: letters of
    queries alone.
    """
    free_letters = rf"a-zA-Z0-9\-._~!$&'()*+,;={extra_letters}"
    percent_coded = "%[0-9a-fA-F]{2}"
    letter = f"(?:[{free_letters}:@]|{percent_coded})"
    user_part = f"(?:(?:[{free_letters}:]|{percent_coded})*@)?"
    future = r"[vV][0-9a-fA-F]+\.[a-zA-Z0-9\-._~!$&'()*+,;=:]+"
    host_part = rf"(?:\[(?:{IPV6}|{future})\]|(?:[{free_letters}]|{percent_coded})*)"
    rooted_path = (
        f"//{user_part}{host_part}(?::[0-9]*)?(?:/{letter}*)*|/(?:{letter}+(?:/{letter}*)*)?"
    )
    rootless_path = f"{letter}+(?:/{letter}*)*"
    query = rf"(?:\?(?:[{free_letters}:@/?{private}]|{percent_coded})*)?"
    query_tail = rf"{query}(?:\#(?:[{free_letters}:@/?]|{percent_coded})*)?"
    full_address = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{rooted_path}|{rootless_path})?{query_tail}"
    if not relative:
        return full_address
    first_segment = f"(?:[{free_letters}@]|{percent_coded})+(?:/{letter}*)*"  # without a colon
    return f"(?:{full_address}|(?:{rooted_path}|{first_segment})?{query_tail})"


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
    "uri": _address_pattern("", "", relative=False),
    "uri-reference": _address_pattern("", "", relative=True),
    "iri": _address_pattern(WIDE, PRIVATE, relative=False),
    "iri-reference": _address_pattern(WIDE, PRIVATE, relative=True),
    "uri-template": TEMPLATE,
    "json-pointer": POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:\#|{POINTER})",
}
LONGEST = {"hostname": 253}  # letters, where a format bounds them
# Formats of the standard that no regular expression says; all others are annotations.
UNCHECKED = ("regex", "idn-hostname", "idn-email")
