"""Lets the ranks of a NCCL group share a GPU."""

from __future__ import annotations

import os

import torch

SHARES_SINCE = (2, 30)
"""NCCL's version from which ranks may share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1."""


def share_gpu(rank: int) -> None:
    """Let this process, one rank of several on this machine, share its GPU; call it before its first group.

    An older NCCL refuses two ranks of one host on one GPU: for it, each rank says that it is on a host of its own, and
    NCCL connects them by sockets.
    """
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if torch.cuda.nccl.version() < SHARES_SINCE:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
