"""Our calls of private and changing functions of torch and transformers against the table of them, and the table
against what is installed.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import _fa3

from dhp_ray.comm.device import WATCHDOGS
from dhp_ray.compatibility import fsdp_param_groups
from tests.contracts.calls import Source, calls_that_do_not_fit, signature_of

TABLE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "installed.yaml").read_text(encoding="utf-8"))
ENTRIES: dict[str, dict[str, Any]] = TABLE["functions"] | TABLE["methods"]
OF_NAMED_TUPLES = {"._replace", "._asdict"}


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


def installed(name: str) -> inspect.Signature:
    """Of a function, or of a method without its self."""
    found = inspect.signature(pkgutil.resolve_name(name))
    parameters = list(found.parameters.values())
    return found.replace(parameters=parameters[1:] if parameters and parameters[0].name in ("self", "cls")
                         else parameters)


def as_used(name: str) -> str:
    """How the source has an entry of the table: a method stands behind objects of any kind."""
    return f".{name.rpartition('.')[2]}" if name in TABLE["methods"] else name


def as_operator(text: str) -> str:
    return f"torch.ops.aten.{text.partition('(')[0]}"


def as_attribute(holder: str, name: str) -> str:
    """How the source has an attribute: of a class, behind objects of any kind."""
    return f".{name}" if holder.rpartition(".")[2][0].isupper() else f"{holder}.{name}"


def in_table() -> set[str]:
    """All names of the table, as the source has them."""
    attributes = {as_attribute(holder, name) for holder, names in TABLE["attributes"].items()
                  for alternatives in names for name in alternatives.split(" or ")}
    return {*map(as_used, ENTRIES), *map(as_operator, TABLE["operators"]), *attributes}


def unknown(source: Source) -> dict[str, set[str]]:
    """The internals of torch and transformers that we use and that are not in the table, with the files that do. A
    module or an object may be used for what the table has of it, and that for what it has itself.
    """
    known = in_table() | OF_NAMED_TUPLES
    return {name: files for name, files in source.internals().items()
            if not any(f"{entry}.".startswith(f"{name}.") or f"{name}.".startswith(f"{entry}.") for entry in known)}


def differences(ours: inspect.Signature, theirs: inspect.Signature) -> Iterator[str]:
    """Why what fits `ours` may not fit `theirs`, or mean something else there."""
    places = {name: place for place, name in enumerate(theirs.parameters)}
    for place, (name, parameter) in enumerate(ours.parameters.items()):
        found = theirs.parameters.get(name)
        if found is None:
            yield f"{name}: is gone"
        elif parameter.kind == parameter.POSITIONAL_OR_KEYWORD and (places[name] != place
                                                                    or found.kind != parameter.kind):
            yield f"{name}: is no longer argument number {place + 1}"
        elif parameter.default is parameter.empty and found.default is not found.empty:
            yield f"{name}: has the default {found.default!r}"
        elif parameter.default not in (parameter.empty, ..., found.default):
            yield f"{name}: has the default {found.default!r}, not {parameter.default!r}"
    for name, parameter in theirs.parameters.items():
        if (name not in ours.parameters and parameter.default is parameter.empty
                and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)):
            yield f"{name}: is new, and must be given"


@pytest.mark.parametrize("name", ENTRIES)
def test_what_is_installed_is_as_the_table_says(name: str) -> None:
    entry = ENTRIES[name]
    if "needs" in entry:
        pytest.importorskip(entry["needs"])
    assert list(differences(signature_of(entry["signature"]), installed(name))) == []
    found = inspect.getsourcefile(inspect.unwrap(pkgutil.resolve_name(name)))
    assert found is not None
    assert Path(found).as_posix().endswith(f"/{entry['file']}")


@pytest.mark.parametrize("name", ENTRIES)
def test_our_calls_fit_the_table(source: Source, name: str) -> None:
    entry = ENTRIES[name]
    assert list(calls_that_do_not_fit(source, as_used(name), signature_of(entry["signature"]))) == []
    assert sorted(source.used[as_used(name)]) == entry["used"]


@pytest.mark.parametrize("name", ["forward_impl_default", "backward_impl"])
def test_flash_attention_3_takes_our_calls_of_the_operators(source: Source, name: str) -> None:
    """What torch registers for them then; it refuses dropout and a debug mask, of which our calls have none."""
    replaced = getattr(_fa3, f"_fa3_flash_attention_{name}")
    operator = f"torch.ops.aten._flash_attention_{name.partition('_')[0]}"
    assert source.used[operator] == {"dhp_ray/model/kernels/cuda.py"}
    assert list(calls_that_do_not_fit(source, operator, inspect.signature(replaced))) == []
    schema = getattr(torch.ops.aten, operator.rpartition(".")[2]).default._schema
    assert [*inspect.signature(replaced).parameters][:8] == [argument.name for argument in schema.arguments][:8]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has kernels of its own there")
def test_flash_attention_3_lies_behind_the_operators_that_we_call() -> None:
    def has_kernels() -> list[bool]:
        return [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::_flash_attention_{way}", "CUDA")
                for way in ("forward", "backward")]

    assert has_kernels() == [False, False]
    library = _fa3._fa3_register_kernels()
    assert has_kernels() == [True, True]
    library._destroy()


@pytest.mark.parametrize("text", TABLE["operators"], ids=lambda text: text.partition("(")[0])
def test_operators_are_as_the_table_says(text: str) -> None:
    schema = torch._C.parse_schema(f"aten::{text}")
    found = getattr(torch.ops.aten, schema.name.removeprefix("aten::")).default._schema
    assert found.is_backward_compatible_with(schema), f"{found}\nis not\n{schema}"


@pytest.mark.parametrize("text", TABLE["operators"], ids=lambda text: text.partition("(")[0])
def test_our_calls_fit_the_operators(source: Source, text: str) -> None:
    schema = torch._C.parse_schema(f"aten::{text}")
    keyword_only = [argument for argument in schema.arguments if argument.kwarg_only]
    parts = [f"{argument.name}=..." if argument.has_default_value() else argument.name
             for argument in schema.arguments if not argument.kwarg_only]
    parts += ["*", *(f"{argument.name}=..." for argument in keyword_only)]
    assert list(calls_that_do_not_fit(source, as_operator(text), signature_of(f"({', '.join(parts)})"))) == []


def test_every_internal_that_we_use_is_in_the_table(source: Source) -> None:
    assert unknown(source) == {}


@pytest.mark.parametrize(("text", "name"), [
    ("from torch.distributed import distributed_c10d as c10d; c10d._unheard_of()",
     "torch.distributed.distributed_c10d._unheard_of"),
    ("from torch.distributed.fsdp._fully_shard import _fsdp_init", "torch.distributed.fsdp._fully_shard._fsdp_init"),
    ("import torch; torch._C._unheard_of()", "torch._C._unheard_of"),
    ("import torch; torch.ops.aten._unheard_of(1)", "torch.ops.aten._unheard_of"),
    ("from torch._C import Graph", "torch._C.Graph"),
    ("import torch.distributed._functional_collectives", "torch.distributed._functional_collectives"),
    ("from transformers.masking_utils import create_causal_mask", "transformers.masking_utils.create_causal_mask"),
    ("from torch import nn\ndef f(module): return getattr(module, '_unheard_of')", "._unheard_of"),
    ("from torch import nn\ndef f(module): return module._unheard_of", "._unheard_of")])
def test_an_internal_that_is_not_in_the_table_is_told(text: str, name: str) -> None:
    source = Source(folders=())
    source.read(text, "new.py")
    assert unknown(source)[name] == {"new.py"}


def test_what_is_documented_need_not_be_in_the_table() -> None:
    source = Source(folders=())
    source.read("import transformers, torch\nclass A:\n  def __init__(self): self._x = torch.nn.Linear(1, 1)\n"
                "def f(a, model): return a._x.__class__, transformers.AutoModel.from_pretrained(model)", "new.py")
    assert unknown(source) == {}


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, Any]]:
    """Those that the table names by their kind: of a module that FSDP has sharded over one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        module: Any = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
        (group,) = fsdp_param_groups(module)
        yield {"DeviceMesh": mesh, "FSDPState": module._get_fsdp_state(), "FSDPParamGroup": group,
               "FSDPMeshInfo": group.mesh_info}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("holder", TABLE["attributes"])
def test_attributes_are_as_the_table_says(source: Source, objects: dict[str, Any], holder: str) -> None:
    if "NCCL" in holder and not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    found = objects[holder] if holder in objects else pkgutil.resolve_name(holder)
    for alternatives, files in TABLE["attributes"][holder].items():
        names = alternatives.split(" or ")
        assert any(hasattr(found, name) for name in names), alternatives
        for name in names:
            assert sorted(source.used[as_attribute(holder, name)]) == files


def test_parameters_of_fsdp_can_be_freed(objects: dict[str, Any]) -> None:
    parameters = objects["FSDPParamGroup"].fsdp_params
    assert parameters
    assert all(hasattr(parameter, "free_unsharded_param") for parameter in parameters)


@pytest.mark.parametrize("name", TABLE["implemented"])
def test_ours_takes_what_it_is_called_with(name: str) -> None:
    theirs, ours = installed(name), installed(TABLE["implemented"][name])
    given = [parameter for parameter in theirs.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    positional = [parameter for parameter in given if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    ours.bind(*[None] * len(positional), **{parameter.name: None for parameter in given if parameter not in positional})
    ours.bind(**{parameter.name: None for parameter in given})


@pytest.mark.parametrize("name", TABLE["implemented by name"])
def test_ours_takes_what_it_is_called_with_by_name(name: str) -> None:
    theirs, ours = installed(name), installed(TABLE["implemented by name"][name])
    first, *given = (parameter.name for parameter in theirs.parameters.values()
                     if parameter.kind != parameter.VAR_KEYWORD and parameter.name != "self")
    context = dict.fromkeys({"context"} & ours.parameters.keys())  # which the language model hands down
    ours.bind(*[None] * ("self" in ours.parameters), None, **dict.fromkeys(given), **context)
    ours.bind(*[None] * ("self" in ours.parameters), **dict.fromkeys([first, *given]), **context)


@pytest.mark.parametrize(("called", "ours"), [("AllGather", "all_gather_single"),
                                              ("ReduceScatter", "reduce_scatter_single")])
def test_collectives_take_what_fsdp_gives_them(called: str, ours: str) -> None:
    """Behind TimedCollective, which hands on the two tensors, and what else it is given by name."""
    _, _, *options = installed(f"torch.distributed.fsdp._fully_shard._fsdp_api.{called}.__call__").parameters
    installed(f"dhp_ray.compatibility.{ours}").bind(None, None, **dict.fromkeys(options))


def test_torch_reads_the_variable_of_its_watchdog() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    assert [name for name in WATCHDOGS if "NCCL" in name and f'"{name}"' not in header.read_text()] == []


@pytest.mark.parametrize(("changed", "told"), [
    ("(timeout)", "group: is gone"), ("(group=None, timeout=None)", "timeout: is no longer argument number 1"),
    ("(timeout, group=0)", "group: has the default 0, not None"), ("(timeout, group=None, *, why)", "why: is new"),
    ("(timeout, group)", "group: has the default"), ("(timeout, group=None, *, why=None, **rest)", "")])
def test_changes_are_told(changed: str, told: str) -> None:
    found = list(differences(signature_of("(timeout, group=None)"), signature_of(changed)))
    assert any(line.startswith(told) for line in found) if told else found == []
