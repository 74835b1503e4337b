from __future__ import annotations

import copy
import pickle

import pytest

from dhp_ray.credentials import Uri, concealed, full_uri, masked


@pytest.mark.parametrize(("text", "shown"), [
    ("s3://KEY:secret@bucket/run", "s3://***@bucket/run"),
    ("s3://KEY:se/c@ret@bucket/run", "s3://***@bucket/run"),
    ("s3:/KEY:secret@bucket/run", "s3:/***@bucket/run"),  # what a path makes of it
    ("got 's3://KEY:secret@b/x' and abfs://:secret@account/x; allowed",
     "got 's3://***@b/x' and abfs://***@account/x; allowed"),
    ("abfs://box@account/x?client_id=7&client_secret=a%2Fb&x=1",
     "abfs://box@account/x?client_id=7&client_secret=***&x=1"),
    ("https://host/cat.png?X-Amz-Signature=ab&X-Amz-Date=7", "https://host/cat.png?X-Amz-Signature=***&X-Amz-Date=7"),
    ("hdfs://name:9000/runs/a@b", "hdfs://name:9000/runs/a@b"),
    ("hdfs://user@name/runs", "hdfs://user@name/runs"),
    ("s3://bucket/run?endpoint_override=127.0.0.1:9000&scheme=http",
     "s3://bucket/run?endpoint_override=127.0.0.1:9000&scheme=http"),
    ("/runs/a:b@c", "/runs/a:b@c"),
    ("step 3: a@b", "step 3: a@b"),
])
def test_a_text_keeps_all_but_credentials(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown


def test_a_uri_is_its_shown_form_and_carries_the_whole() -> None:
    whole = "s3://KEY:secret word@bucket/run"
    uri = concealed(whole)
    for again in (uri, copy.deepcopy(uri), pickle.loads(pickle.dumps(uri)), concealed(uri), concealed([uri])[0]):
        assert isinstance(again, Uri)
        assert (str(again), repr(again), f"{again}",
                full_uri(again)) == ("s3://***@bucket/run", "'s3://***@bucket/run'", "s3://***@bucket/run", whole)
    assert type(concealed("s3://bucket/run")) is str
    assert concealed([3, "runs/x", None]) == [3, "runs/x", None]
