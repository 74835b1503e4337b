"""One of two nodes is drained under a run, as after a spot notice, and another node comes. `python drained_node.py
FOLDER`; see test_drain.py.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.worlds import data_overrides
from tests.integration.faults import Run, expected_ledger
from tests.integration.nodes import Nodes

PREEMPTION = 2
"""Ray's number for the reason; a raylet accepts it whatever runs there."""

SETTINGS = ("data.max_pixels=40000", "planner.tokens_per_rank=512", "planner.max_sequence_tokens=512",
            "batch.global_samples=6", "cluster.num_workers=4",
            "cluster.min_workers=2", "cluster.cpus_per_worker=1.3", "cluster.start_timeout_s=120",
            "checkpoint.every_steps=0", "run.steps=4000")


def main(folder: Path) -> None:
    with Nodes(head_cpus=1) as nodes:
        os.environ["RAY_ADDRESS"] = nodes.address
        first, _ = nodes.add(3), nodes.add(3)
        run = Run(folder / "run", *data_overrides("", folder), *SETTINGS)
        try:
            run.wait_for_step(4, 180)
            drain(nodes.address, first.node_id)
            moment = time.time()
            run.wait_for_event(moment, "generation", timeout_s=90)
            nodes.vanish(first)
            left = len(run.pids)
            nodes.add(3)
            run.wait_for_ranks(4, 180)
            run.process.send_signal(signal.SIGTERM)
            status = run.wait(180)
            import ray  # now that Nodes has named its folder

            ray.init(nodes.address, logging_level="ERROR")
            expected = expected_ledger(run.folder, run.step)
            ray.shutdown()
        finally:
            run.end()
        found = {"status": status, "left": left, "as_undisturbed": run.ledger == expected, "events": run.events(),
                 "drained": first.node_id}
        (folder / "found.json").write_text(json.dumps(found))


def drain(address: str, node_id: str) -> None:
    from ray._raylet import GcsClient

    accepted, why = GcsClient(address=address).drain_node(node_id, PREEMPTION, "spot notice",
                                                          int(1000 * (time.time() + 120)))
    assert accepted, why


if __name__ == "__main__":
    main(Path(sys.argv[1]))
