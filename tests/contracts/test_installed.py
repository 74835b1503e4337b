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

from dhp_ray.comm.device import WATCHDOGS
from dhp_ray.compatibility import fsdp_param_groups
from tests.contracts.calls import Source, calls_that_do_not_fit, signature_of

TABLE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "installed.yaml").read_text(encoding="utf-8"))
SIGNATURES: dict[str, str] = TABLE["functions"] | TABLE["methods"]
OF_NAMED_TUPLES = {"_replace"}


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


def installed(name: str) -> inspect.Signature:
    """Of a function, or of a method without its self."""
    found = inspect.signature(pkgutil.resolve_name(name))
    parameters = list(found.parameters.values())
    return found.replace(parameters=parameters[1:] if parameters and parameters[0].name in ("self", "cls")
                         else parameters)


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


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_installed_is_as_the_table_says(name: str) -> None:
    assert list(differences(signature_of(SIGNATURES[name]), installed(name))) == []


@pytest.mark.parametrize("name", SIGNATURES)
def test_our_calls_fit_the_table(source: Source, name: str) -> None:
    assert list(calls_that_do_not_fit(source, name, signature_of(SIGNATURES[name]))) == []


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
    name = schema.name.replace("aten::", "torch.ops.aten.")
    assert list(calls_that_do_not_fit(source, name, signature_of(f"({', '.join(parts)})"))) == []


def test_every_private_name_that_we_use_is_in_the_table(source: Source) -> None:
    named = {part for name in [*SIGNATURES, *TABLE["attributes"]] for part in name.split(".")}
    named |= {text.partition("(")[0] for text in TABLE["operators"]}
    named |= {part for names in TABLE["attributes"].values() for name in names for part in name.split()}
    missing = {name: place for name, place in source.private_names().items() if name not in named | OF_NAMED_TUPLES}
    assert missing == {}


def test_attributes_are_as_the_table_says(source: Source) -> None:
    """Of objects that are in use: a module that FSDP has sharded over one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        module: Any = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
        state = module._get_fsdp_state()
        (group,) = fsdp_param_groups(module)
        holders = {"torch.distributed.distributed_c10d._world": dist.distributed_c10d._world, "DeviceMesh": mesh,
                   "FSDPState": state, "FSDPParamGroup": group, "FSDPMeshInfo": group.mesh_info}
        for kind, names in TABLE["attributes"].items():
            for alternatives in (name.split(" or ") for name in names):
                assert any(hasattr(holders[kind], name) for name in alternatives), (kind, alternatives)
                assert all(name in source.used for name in alternatives), (kind, alternatives)
        assert group.fsdp_params
        assert all(hasattr(parameter, "free_unsharded_param") for parameter in group.fsdp_params)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", TABLE["implemented"])
def test_ours_takes_what_it_is_called_with(name: str) -> None:
    theirs, ours = installed(name), installed(TABLE["implemented"][name])
    given = [parameter for parameter in theirs.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    positional = [parameter for parameter in given if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    ours.bind(*[None] * len(positional), **{parameter.name: None for parameter in given if parameter not in positional})
    ours.bind(**{parameter.name: None for parameter in given})


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
