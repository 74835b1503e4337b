import subprocess
import sys

import pytest
import torch

from dhp_ray.comm.device import ACCELERATORS, CPU, CUDA, NPU, choose


def test_names_backends_and_resources() -> None:
    assert [(a.name, a.backend, a.resource) for a in ACCELERATORS.values()] == [("cpu", "gloo", None), ("cuda", "nccl", "GPU"), ("npu", "hccl", "NPU")]


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


def test_an_unknown_device_names_those_allowed() -> None:
    with pytest.raises(ValueError, match=r"got 'tpu'; allowed: auto, cpu, cuda, npu"):
        choose("tpu")


def test_importing_it_does_not_import_torch() -> None:
    program = "import sys; import dhp_ray.comm.device as device; print(device.CUDA.resource, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split() == ["GPU", "False"]


@pytest.mark.gpu
def test_cuda_is_activated() -> None:
    accelerator = choose("cuda")
    accelerator.activate(0)
    assert torch.cuda.current_device() == 0
    assert torch.ones(1, device=accelerator.torch_device()).device == torch.device("cuda", 0)
    assert accelerator.memory_bytes() > 2**30
