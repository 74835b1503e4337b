from __future__ import annotations

import copy
import pickle
import time
from dataclasses import asdict

import pytest
import yaml

from dhp_ray.config import dump, load
from dhp_ray.credentials import MOST_OF_ERROR, Uri, concealed, full_uri, masked
from dhp_ray.data.errors import DataError
from dhp_ray.measure.fitting import MeasureError
from dhp_ray.model.files import ModelError
from dhp_ray.runtime.messages import RunError
from dhp_ray.storage import StorageError
from tests.test_config import refused


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
    ("s3://KEY:12/abc@bucket", "s3://***@bucket"),
    ("gs:/KEY:12?a/abc@bucket", "gs:/***@bucket"),
    ("http://host:9000/runs/a@b", "http://host:9000/runs/a@b"),
    ("https://host/cat.png?pwd=ab&PassPhrase=c&x=1", "https://host/cat.png?pwd=***&PassPhrase=***&x=1"),
    ("/runs/a:b@c", "/runs/a:b@c"),
    ("step 3: a@b", "step 3: a@b"),
])
def test_a_text_keeps_all_but_credentials(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize("text", ["a://b:" * 50_000, "@" + "a://b:" * 50_000, ":/" + "?" * 300_000,
                                  "://?" + "key" * 100_000, "s3://a?" + "&key" * 100_000])
def test_a_long_text_is_searched_once(text: str) -> None:
    """Some took the square of their length: minutes."""
    begun = time.process_time()
    assert masked(text) == text
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("kind", [DataError, MeasureError, ModelError, RunError, StorageError])
def test_errors_are_one_line_without_what_a_terminal_obeys(kind: type[Exception]) -> None:
    """Their messages hold names of files, and what others say about them."""
    error = kind(f"a\x1b]0;title\x07\u202e\nb s3://KEY:SECRET@bucket {'c' * 10_000}")
    assert str(error).startswith("a\\x1b]0;title\\x07\\u202e b s3://***@bucket ccc")
    assert len(str(error)) == MOST_OF_ERROR
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_uri_is_its_shown_form_and_carries_the_whole() -> None:
    whole = "s3://KEY:secret word@bucket/run"
    uri = concealed(whole)
    for again in (uri, copy.deepcopy(uri), pickle.loads(pickle.dumps(uri)), concealed(uri), concealed([uri])[0]):
        assert isinstance(again, Uri)
        assert (str(again), repr(again), f"{again}",
                full_uri(again)) == ("s3://***@bucket/run", "'s3://***@bucket/run'", "s3://***@bucket/run", whole)
    assert type(concealed("s3://bucket/run")) is str
    assert concealed([3, "runs/x", None]) == [3, "runs/x", None]


def test_credentials_reach_storage_and_no_text(bare: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what the configuration writes of itself, nor what it says of a value; and it takes nothing from the
    environment.
    """
    monkeypatch.setenv("ANY_SECRET", "from-the-environment")
    config = load([*bare, "run.dir=s3://KEY:secret@bucket/x?region=a"])
    config = pickle.loads(pickle.dumps(config))
    assert full_uri(config.run.dir) == "s3://KEY:secret@bucket/x?region=a"
    assert "secret" not in dump(config) + repr(config) + str(asdict(config)) + str(config.run.dir)
    assert yaml.safe_load(dump(config))["run"]["dir"] == "s3://***@bucket/x?region=a"
    for word in ("run.dir=${oc.env:ANY_SECRET}", "run.dir=x-${oc.env:ANY_SECRET}",
                 "train.freeze=['${oc.env:ANY_SECRET}']", "run.steps=${oc.env:ANY_SECRET}"):
        message = refused([*bare, word])
        assert "from-the-environment" not in message
        assert "allowed: a plain value, without ${...}" in message
    for word in ("s3://KEY:secret@b", "x=s3://KEY:secret@b", "run.dirr=s3://KEY:secret@b",
                 "data.format=s3://KEY:secret@b", "--config=s3://KEY:secret@b",
                 "train.freeze=['s3://KEY:secret@b']", "model=s3://KEY:secret@b", "data.sources=[s3://KEY:secret@b]",
                 "data.sources=[{path: 's3://KEY:secret@b/y'}]"):
        assert "secret" not in refused([*bare, word])
