"""Our calls of torch_npu against the table of what it has, and the table against the wheel itself."""

from __future__ import annotations

import ast
import inspect
import zipfile
from collections.abc import Iterator

import pytest
import torch
import yaml

from dhp_ray.comm.device import WATCHDOGS
from tests.contracts.calls import DEVICE, ROOT, Source, calls_that_do_not_fit, signature_of
from tests.contracts.npu_operators import TABLE
from tests.contracts.wheels import wheel_of


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel that the extra `npu` asks for, as a file: it needs a device's libraries to be installed."""
    with wheel_of("torch_npu", tmp_path_factory.mktemp("wheel")) as opened:
        yield opened


@pytest.mark.seconds
def test_every_operator_that_we_call_is_in_the_table(source: Source) -> None:
    """tests/model/test_npu_kernel.py and test_fused.py make the calls, through these very schemas."""
    called = {name.removeprefix("torch_npu.") for name in source.used
              if name.startswith("torch_npu.") and not name.startswith("torch_npu._C")}
    assert called == {torch._C.parse_schema(schema).name for schema in TABLE["operators"]}


def test_every_function_of_a_device_that_we_call_is_in_the_table(source: Source) -> None:
    called = {name.removeprefix(f"{DEVICE}.") for name in source.used if name.startswith(f"{DEVICE}.")}
    assert called == set(TABLE["functions"])


@pytest.mark.parametrize("name", TABLE["functions"])
def test_calls_of_a_device_fit_the_table(source: Source, name: str) -> None:
    signature = signature_of(TABLE["functions"][name]["signature"])
    assert list(calls_that_do_not_fit(source, f"{DEVICE}.{name}", signature)) == []


@pytest.mark.parametrize("name", TABLE["process_groups"])
def test_we_use_what_the_table_has_of_process_groups(name: str) -> None:
    """By name alone: the wheel's library says no more of them."""
    assert any(name in (ROOT / "dhp_ray/comm" / file).read_text() for file in ("device.py", "world.py"))


def test_every_variable_that_we_set_is_in_the_table() -> None:
    assert [name for name in WATCHDOGS if "HCCL" in name] == TABLE["environment"]


@pytest.mark.seconds
def test_a_call_that_does_not_fit_is_told() -> None:
    call = next(call for call in Source().calls if call.name == f"{DEVICE}.Event")
    assert "unexpected keyword argument 'enable_timing'" in call.misfit(signature_of("(blocking=False)"))


@pytest.mark.slow
def test_the_wheel_has_the_operators(wheel: zipfile.ZipFile) -> None:
    """As they stand in the table; later arguments may follow, with defaults."""
    entries = functions_of(wheel)
    offered = wheel.read("torch_npu/utils/custom_ops.py").decode()
    for text in TABLE["operators"]:
        schema = torch._C.parse_schema(text)
        found = [torch._C.parse_schema(entry) for entry in entries if entry.startswith(f"{schema.name}(")]
        assert len(found) == 1, f"{schema.name}: {len(found)} in the wheel"
        assert found[0].is_backward_compatible_with(schema), f"{found[0]}\nis not\n{schema}"
        assert f"torch_npu.{schema.name} = torch.ops.npu.{schema.name}\n" in offered


@pytest.mark.slow
@pytest.mark.parametrize("text", TABLE["aten"], ids=lambda text: text.partition("(")[0])
def test_the_wheel_has_operators_of_torch(wheel: zipfile.ZipFile, text: str) -> None:
    """With torch's own schema, by which torch calls them."""
    name, schema = text.partition("(")[0], str(torch._C.parse_schema(f"aten::{text}"))
    assert schema == str(getattr(torch.ops.aten, name).default._schema)
    [found] = [entry for entry in functions_of(wheel) if entry.startswith(f"{name}(")]
    assert str(torch._C.parse_schema(f"aten::{found}")) == schema


def functions_of(wheel: zipfile.ZipFile) -> list[str]:
    """Schemas of all operators of the NPU."""
    tree = yaml.safe_load(wheel.read("torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"))
    return [entry["func"] for part in tree.values() if isinstance(part, list) for entry in part
            if isinstance(entry, dict) and "func" in entry]


@pytest.mark.slow
def test_the_wheel_documents_the_limits(wheel: zipfile.ZipFile) -> None:
    documentation = wheel.read("torch_npu/_op_plugin_docs.py").decode()

    def text_on(operator: str) -> str:
        _, _, text = documentation.partition(f'"{operator}",')
        return text.partition("_add_torch_npu_docstr(")[0].replace("\\", "")

    assert [line["means"] for line in TABLE["documented"]
            if line["says"] not in text_on(line.get("operator", "npu_fusion_attention"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE["functions"])
def test_the_wheel_has_the_functions(wheel: zipfile.ZipFile, name: str) -> None:
    entry = TABLE["functions"][name]
    assert str(_signature(ast.parse(wheel.read(entry["file"])), name)) == entry["signature"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE["environment"])
def test_the_wheel_reads_the_variables(wheel: zipfile.ZipFile, name: str) -> None:
    assert f"\0{name}\0".encode() in wheel.read("torch_npu/lib/libtorch_npu.so")


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE["process_groups"])
def test_the_wheel_has_what_process_groups_need(wheel: zipfile.ZipFile, name: str) -> None:
    assert f"\0{name}\0".encode() in wheel.read("torch_npu/lib/libtorch_npu.so")


def _signature(module: ast.Module, name: str) -> inspect.Signature:
    """Of a function at the module's top level, or of what makes an object of a class there."""
    node = next(node for node in module.body if getattr(node, "name", None) == name)
    if isinstance(node, ast.ClassDef):
        node = next(part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__new__")
        node.args.args.pop(0)  # cls
    assert isinstance(node, ast.FunctionDef)
    for argument in node.args.args:
        argument.annotation = None
    return signature_of(f"({ast.unparse(node.args)})")
