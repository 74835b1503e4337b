from __future__ import annotations

from pathlib import Path

import pytest

from dhp_ray.data import index
from dhp_ray.runtime.job import preflight
from dhp_ray.runtime.job.preflight import index_ahead
from dhp_ray.schema import Data, Source
from tests.data.samples import talk, write_rows


def test_the_index_of_much_data_is_shown_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DHP_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preflight, "LINE_EVERY_S", 0.0)
    paths = []
    for name in "ab":
        rows = [{"id": f"{name}{number}", "conversations": talk("a", "b")} for number in range(40)]
        paths.append(str(write_rows(tmp_path / f"{name}.jsonl", rows)))
    data = Data(format="llava", sources=[Source(path=path) for path in paths])
    index_ahead(data)
    assert not (tmp_path / "cache").exists()  # little data: not worth it
    for module in (index, preflight):
        monkeypatch.setattr(module, "KEPT_FROM_BYTES", 100)
    index_ahead(data)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("indexing ") and line.endswith(" %") for line in lines)
    assert lines[-1] == f"indexing {paths[1]}: 100 %"
    assert len(list((tmp_path / "cache").iterdir())) == 2
    index_ahead(data)
    assert capsys.readouterr().err == ""


def test_what_is_wrong_with_the_data_is_left_to_the_driver(tmp_path: Path) -> None:
    index_ahead(Data(format="llava", path=str(tmp_path / "absent.json")))
