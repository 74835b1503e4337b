from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp_ray.data import json_values
from dhp_ray.data.errors import DataError
from dhp_ray.data.formats import read_rows
from dhp_ray.data.index import index_fragments
from dhp_ray.data.json_values import parsed
from dhp_ray.schema import Data
from tests.data.samples import talk


@pytest.mark.parametrize("text", ["[" + "[]," * 2000 + "1]", "[" + "{}," * 2000 + "1]", "[" + "1," * 4000 + "1]"])
def test_a_text_of_too_many_values_is_not_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(text) == parsed(text.encode()) == json.loads(text)
    monkeypatch.setattr(json_values, "MOST_VALUES", 3000)
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match=r"^400\d values; allowed: at most 3000$"):
            parsed(given)


def test_a_row_of_too_many_values_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "MOST_VALUES", 3000)
    good, bad = {"conversations": talk("a", "b")}, {"conversations": [[]] * 4000}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, (good, bad, good))))
    [fragment] = index_fragments(Data(format="llava", path=str(tmp_path / "rows.jsonl")))
    assert [row.error for row in read_rows(fragment)] == ["", "the row is not JSON: 8001 values; allowed: at most 3000",
                                                          ""]
    (tmp_path / "rows.jsonl").write_text(json.dumps(bad))
    with pytest.raises(DataError, match=r"rows\.jsonl is not JSON: 8001 values"):
        index_fragments(Data(format="llava", path=str(tmp_path / "rows.jsonl")))
