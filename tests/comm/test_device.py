import glob
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dhp_ray.comm.device import ACCELERATORS, CPU, CUDA, NPU, Accelerator, allow_streams, choose, cores
from tests.ranks import run_processes

pytestmark = pytest.mark.gloo("processes that exchange nothing")

ROOT = Path(__file__).parents[2]


def test_names_backends_and_resources() -> None:
    assert [(a.name, a.backend, a.resource)
            for a in ACCELERATORS.values()] == [("cpu", "gloo", None), ("cuda", "nccl", "GPU"), ("npu", "hccl", "NPU")]


def test_cpu_is_always_there() -> None:
    assert choose("cpu") is CPU
    assert CPU.torch_device() == torch.device("cpu")
    CPU.activate()
    assert CPU.memory_bytes() > 2**28


def test_auto_takes_the_best_there_is() -> None:
    chosen = choose("auto")
    assert chosen is (CUDA if torch.cuda.is_available() else CPU) or chosen is NPU


def test_an_absent_device_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match=r"cluster.device: got 'cuda', but this machine has no cuda device") as caught:
        choose("cuda")
    assert "\n" not in str(caught.value)


def test_a_missing_extra_is_one_line_that_names_it() -> None:
    if importlib.util.find_spec("torch_npu"):
        pytest.skip("torch_npu is installed")
    with pytest.raises(
        ValueError,
        match=r"^cluster.device: got 'npu', but torch_npu is not installed on this machine \(pip install "
              r"-e '\.\[npu\]'\); auto",
    ):
        choose("npu")


def computes_deterministically(rank: int, port: int) -> tuple[bool, str, str]:
    CPU.compute_deterministically()
    return (torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"],
            os.environ["HCCL_DETERMINISTIC"])


def test_deterministic_computing_is_asked_of_torch_and_of_the_libraries() -> None:
    """In a process of its own: it cannot be taken back for all of them."""
    assert run_processes(computes_deterministically, 1) == [(True, ":4096:8", "true")]


def chosen_with(rank: int, port: int, folder: str) -> tuple[str, str]:
    """The device of `auto`, and why there is no NPU, with the packages of a folder."""
    sys.path.insert(0, folder)
    with pytest.raises(ValueError, match="torch_npu") as caught:
        choose("npu")
    return choose("auto").name, str(caught.value)


def test_a_torch_npu_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    """As one does without the driver's libraries: the import fails of what it loads."""
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open shared object file\\nmore of it')\n")
    [(name, line)] = run_processes(chosen_with, 1, str(tmp_path))
    assert name in ("cpu", "cuda")
    assert line == (
        "cluster.device: got 'npu', but torch_npu cannot be imported on this machine (libhccl.so: cannot open shared "
        "object file); it needs CANN; "
        "auto takes what there is"
    )


def activated_with(rank: int, port: int, folder: str) -> list[tuple[int, str, str]]:
    """What an NPU finds once it is active, with the packages of a folder."""
    sys.path.insert(0, folder)
    os.environ["TORCH_HCCL_ASYNC_ERROR_HANDLING"] = "1"
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    NPU.activate()
    return importlib.import_module("torch_npu").FOUND  # type: ignore[no-any-return]


def test_an_active_device_leaves_the_process_alone_when_a_peer_is_lost(tmp_path: Path) -> None:
    """torch_npu's device as torch knows it, which says what it finds in the environment when it is first used."""
    (tmp_path / "torch_npu.py").write_text("""
import os, sys, torch

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", sys.modules[__name__])
FOUND = []


def set_device(device):
    FOUND.append((device, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], os.environ["TORCH_HCCL_ASYNC_ERROR_HANDLING"]))
""")
    assert run_processes(activated_with, 1, str(tmp_path)) == [[(0, "0", "0")]]


@pytest.mark.parametrize(("listed", "count"), [("", 0), ("-1", 0), ("NoDevFiles", 0), ("0, 1,", 2), ("3,-1,1", 1)])
def test_devices_that_are_hidden_are_not_shown_again(
    monkeypatch: pytest.MonkeyPatch, listed: str, count: int
) -> None:
    """CUDA reads the list up to the first entry that names no device."""
    monkeypatch.setattr(glob, "glob", lambda pattern: [f"/dev/nvidia{number}" for number in range(8)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert CUDA.num_devices() == count


def test_importing_it_does_not_import_torch() -> None:
    program = "import sys; import dhp_ray.comm.device as device; print(device.CUDA.resource, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=True).stdout.split() == ["GPU", "False"]


@pytest.mark.gpu
def test_cuda_is_activated() -> None:
    accelerator = choose("cuda")
    accelerator.activate()
    assert torch.cuda.current_device() == 0
    assert torch.ones(1, device=accelerator.torch_device()).device == torch.device("cuda", 0)
    assert accelerator.memory_bytes() > 2**30


@pytest.mark.parametrize(("accelerator", "memory_bytes", "groups"), [
    (CPU, 2 * 2**30, 64), (NPU, 64 * 2**30, 51), (NPU, 2**30, 1), (CUDA, 2**40, 64)])
def test_the_pools_groups_take_a_small_share_of_a_devices_memory(
    accelerator: Accelerator, memory_bytes: int, groups: int
) -> None:
    assert accelerator.pool_groups(memory_bytes) == groups


@pytest.mark.parametrize("given", ["1", "2", "7", "0", "", "many", "-1"])
def test_too_few_queues_for_a_devices_streams_are_not_taken(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron-LM's scripts export them."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    line = allow_streams()
    assert line.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS={given} is not used for the workers: ")
    assert "\n" not in line
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert allow_streams() == ""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    choose("cpu")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ, "it comes before the device does"


@pytest.mark.parametrize("given", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_a_devices_memory_may_grow_unless_the_user_says_more(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {given: "max_split_size_mb:512"} if given else {}
    monkeypatch.setattr(os, "environ", dict(environment))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    CUDA.activate()
    assert {name: value for name, value in os.environ.items() if "ALLOC_CONF" in name} == (
        environment or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize("given", ["8", "32", None])
def test_enough_queues_are_left_as_they_are(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    assert allow_streams() == ""
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == given


def test_all_cores_count_where_the_system_does_not_tell_which_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() == sorted(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == list(range(os.cpu_count() or 1))
