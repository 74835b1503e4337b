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
# USER:SECRET@, from the scheme to the last @ of the word: a secret that was not quoted may hold / and @. The port of a
# host (http://host:9000/) is not a secret; buckets (s3://, gs://, ...) have none.
_HOST_SCHEMES = "https?|wss?|ftps?|sftp|hdfs|viewhdfs|webhdfs|swebhdfs|redis|ray|tcp|grpc"
_USERINFO = re.compile(rf"(\b(?:(?:{_HOST_SCHEMES}):/{{1,2}}(?![^\s/@:]*:\d{{1,5}}(?:[/?\s]|$))"
                       rf"|(?!(?:{_HOST_SCHEMES}):)[A-Za-z][A-Za-z0-9+.-]{{0,30}}:/{{1,2}}))[^\s/@:]*:\S*@",
                       re.IGNORECASE)
_OPTION = re.compile(r"([?&#;][^\s=&#;]*(?:secret|pass|pwd|token|credential|signature|auth|jwt|key|sig)[^\s=&#;]*=)"
                     r"[^\s&'\"]+", re.IGNORECASE)


def masked(text: str) -> str:
    """Return a text without the credentials of the URIs in it."""
    if ":/" not in text:  # also what a file name's rules make of ://
        return text
    return _OPTION.sub(rf"\1{MASK}", _USERINFO.sub(rf"\1{MASK}@", text))


def shown(text: str, most: int = MOST_SHOWN) -> str:
    """What a person sees of a name or a reason that comes from the data: printable, without credentials, and at most
    `most` characters.
    """
    line = printable(masked(text[: most + 2000]))  # a bound: the search for credentials takes long in a long text
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
    """Return a configuration's value: strings with credentials in them as Uri, also inside lists; everything else
    unchanged.
    """
    if isinstance(value, list):
        return [concealed(inner) for inner in value]
    return Uri(value) if isinstance(value, str) and MASK in _shown(value) and MASK not in value else value


def full_uri(uri: str) -> str:
    """Return what storage opens: the URI with its credentials, if it has any."""
    return uri.full if isinstance(uri, Uri) else uri


def _shown(uri: str) -> str:
    """Return a whole URI without its credentials. A URI must not have spaces; if it has, they must not end the secret
    early.
    """
    return masked(re.sub(r"\s", "%20", uri)) if ":/" in uri else uri
