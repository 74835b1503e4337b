"""Credentials in URIs: storage uses them, and nothing that a person reads shows them.

    s3://KEY:SECRET@bucket/runs?region=eu-1    what the user gives; `Uri.full`
    s3://***@bucket/runs?region=eu-1           what config.yaml, errors, logs and TensorBoard hold; the Uri as a string
"""

from __future__ import annotations

import re
from typing import Any

from dhp_ray.errors import printable

MASK = "***"
MOST_SHOWN = 200
MOST_OF_ERROR = 2000  # characters: a message holds paths, and each may have hundreds
# USER:SECRET@, from the scheme to the last @ of the word: a secret that was not quoted may hold / and @. The port of a
# host (http://host:9000/) is not a secret; buckets (s3://, gs://, ...) have none.
_HOST_SCHEMES = "https?|wss?|ftps?|sftp|hdfs|viewhdfs|webhdfs|swebhdfs|redis|ray|tcp|grpc"
_USER = re.compile(rf"(\b(?:(?:{_HOST_SCHEMES}):/{{1,2}}(?![^\s/@:]*:\d{{1,5}}(?:[/?\s]|$))"
                   rf"|(?!(?:{_HOST_SCHEMES}):)[A-Za-z][A-Za-z0-9+.-]{{0,30}}:/{{1,2}}))[^\s/@:]*:", re.IGNORECASE)
# NAME=VALUE, where NAME follows one of ?&#; and tells that VALUE is a secret. A name is searched once, from its begin:
# what can match from every character of it on takes the square of its length.
_NAME = re.compile(r"(?<![^\s=&#;])[^\s=&#;]*+=")
_SECRET = re.compile("secret|pass|pwd|token|credential|signature|auth|jwt|key|sig", re.IGNORECASE)
_VALUE = re.compile(r"[^\s&'\"]+")


def masked(text: str) -> str:
    """Return a text without the credentials of the URIs in it."""
    if ":/" not in text:  # also what a file name's rules make of ://
        return text
    return _without_options(re.sub(r"\S+", _without_user, text))


def _without_user(word: re.Match[str]) -> str:
    last = word[0].rfind("@")
    found = _USER.search(word[0], 0, last + 1)
    return f"{word[0][: found.end(1)]}{MASK}{word[0][last:]}" if found else word[0]


def _without_options(text: str) -> str:
    pieces, begin = [], 0
    for found in _NAME.finditer(text):
        start = max(begin, found.start())
        name = text[start : found.end() - 1]
        if start == begin or text[start - 1] not in "&#;":
            name = name.partition("?")[2]
        value = _VALUE.match(text, found.end()) if start < found.end() and _SECRET.search(name) else None
        if value:
            pieces += [text[begin : value.start()], MASK]
            begin = value.end()
    return "".join([*pieces, text[begin:]])


def shown(text: str, most: int = MOST_SHOWN) -> str:
    """What a person sees of foreign text: printable, without credentials, of at most `most` characters."""
    line = printable(masked(text[: most + 2000]))  # a bound: a name may be a whole picture
    return line if len(line) <= most else f"{line[: most - 1]}…"


class Uri(str):
    """A URI that reads, prints, compares and is written without its credentials; `full` has them, in copies too."""

    full: str

    def __new__(cls, full: str) -> Uri:
        uri = super().__new__(cls, _shown(full))
        uri.full = full
        return uri

    def __reduce__(self) -> tuple[Any, ...]:
        return Uri, (self.full,)


def concealed(value: Any) -> Any:
    """Return a configuration's value, with Uri for strings with credentials, also inside lists."""
    if isinstance(value, list):
        return [concealed(inner) for inner in value]
    return Uri(value) if isinstance(value, str) and MASK in _shown(value) and MASK not in value else value


def full_uri(uri: str) -> str:
    """Return what storage opens: the URI with its credentials, if it has any."""
    return uri.full if isinstance(uri, Uri) else uri


def _shown(uri: str) -> str:
    """Return a whole URI without its credentials; spaces, which it must not have, end no secret early."""
    return masked(re.sub(r"\s", "%20", uri)) if ":/" in uri else uri
