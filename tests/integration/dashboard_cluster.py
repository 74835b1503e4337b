"""A cluster of two nodes with a dashboard, in a process of its own: `python dashboard_cluster.py PORT` prints
{"address": ..., "dashboard": ...} and lives until its standard input is closed. Jobs are submitted to it as to any
cluster."""

from __future__ import annotations

import json
import socket
import sys

from ray.cluster_utils import Cluster


def main(port: int) -> None:
    head = {"num_cpus": 1, "include_dashboard": True, "dashboard_port": port,
            "dashboard_agent_listen_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    # Machines do not share a disk: in one folder the second node would unpack the job's code anew, below the feet of
    # the first one's processes.
    cluster.add_node(num_cpus=1, dashboard_agent_listen_port=free_port(),
                     runtime_env_dir_name="runtime_resources_of_the_second_node")
    print(json.dumps({"address": cluster.address, "dashboard": f"http://{cluster.webui_url}"}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


def free_port() -> int:
    """For the agent that starts jobs: with Ray's default, another cluster on this machine would leave a node without
    one.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(int(sys.argv[1]))
