"""A node that Ray takes away with notice: its workers leave before it goes, what they hold is saved, and nothing is run
twice.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("drained_node.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_workers_of_a_drained_node_leave_before_it_goes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=580,
                          check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    events = found["events"]
    lost = [event for event in events if event["kind"] == "worker_lost"]
    assert found["status"] == 1  # SIGTERM, once the other node has come
    assert found["left"] == 2
    assert [event["condition"] for event in lost] == ["drained", "drained"]
    assert {event["node_id"] for event in lost} == {found["drained"]}
    assert not [event for event in events if event["kind"] == "rollback"]
    kinds = [event["kind"] for event in events]
    assert kinds.index("checkpoint") < kinds.index("generation")
    assert found["as_undisturbed"]
