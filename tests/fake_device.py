"""A device without memory and numbers, on a machine that has none: fake tensors, on what torch leaves for devices of
others, over the operators of CUDA, and streams that order and do nothing else. What a real one does without a word is
noted:

    read    the host waits: for a number, or for a copy from or to memory that is not pinned
    mix     an operator takes tensors of the device and of the host (numbers of the host may meet it)
    race    a stream uses what another one has written, writes what another one uses, or has memory back that another
            one uses, and has not waited for it

What depends on a number of the device and is no number itself (`nonzero`, a mask as index) raises, as fake tensors do.
Every stream and event has a clock: how much of each stream's work is before it. torch's device is one of the whole
process, so it has a process of its own, which an error in a backward pass ends.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "npu"
TAKE_NO_NUMBERS = tuple(f"aten.{name}" for name in (
    "empty", "new_empty", "zeros_like", "new_zeros", "full_like", "ones_like"))
"""How the names of operators begin that take a tensor's shape and type alone."""


class Stream:
    """Its `clock`: of each stream by number, how many pieces of work are done before what this one is given next."""

    everyone: ClassVar[list[Stream]] = []

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.number, self.clock = len(self.everyone), Counter[int]()
        self.everyone.append(self)

    def works(self) -> int:
        """Begin a piece of work; its number."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def has_waited_for(self, other: Stream, work: int) -> bool:
        return self.clock[other.number] >= work

    def wait_stream(self, other: Stream) -> None:
        self.clock |= other.clock

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits, and gives every stream what it gives later."""
        for stream in self.everyone:
            stream.clock |= self.clock


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.clock = Counter[int]()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Counter((stream or Module.current).clock)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        for stream in Stream.everyone:
            stream.clock |= self.clock

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class Module(_DummyBackendModule):
    """What `torch.cuda` is to CUDA."""

    Stream, Event = Stream, Event
    current = Stream()
    _initialized = True

    def current_stream(self, device: Any = None) -> Stream:
        return Module.current

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, Module.current = Module.current, stream
        try:
            yield
        finally:
            Module.current = before

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


class Use(NamedTuple):
    """Of bytes `begin` to `end` of a storage."""

    begin: int
    end: int
    writes: bool
    stream: Stream
    work: int
    where: str


class Storage:
    """What streams do with it. `owner`: the stream that gets its memory back."""

    def __init__(self, owner: Stream) -> None:
        self.owner, self.uses = owner, list[Use]()


class FakeDevice(TorchDispatchMode):
    """Put `with` around what runs on the device; `found` has what was noted, and how often."""

    def __init__(self) -> None:
        super().__init__()
        _setup_privateuseone_for_python_backend(NAME, Module())
        self.device, self.found = torch.device(NAME, 0), Counter[str]()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: dict[int, Storage] = {}
        self._pinned: set[int] = set()

    def __enter__(self) -> FakeDevice:
        self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def of_host(self, tensor: Tensor) -> Tensor:
        """A tensor like this one in pinned memory of the host, as inputs are."""
        there = self._fake.from_tensor(tensor.clone())
        self._pin(there)
        return there

    def note(self, what: str) -> None:
        self.found[f"{what} at {here()}"] += 1

    def use(self, tensor: Tensor, writes: bool, stream: Stream, work: int, name: str) -> None:
        """`stream` works with a tensor."""
        if tensor.device != self.device or not tensor.numel():
            return
        size = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride()))
        begin = tensor.storage_offset() * tensor.element_size()
        mine = Use(begin, begin + size * tensor.element_size(), writes, stream, work, f"{name} at {here()}")
        uses = self._of(tensor).uses
        for other in uses:
            apart = other.end <= mine.begin or mine.end <= other.begin or not (other.writes or writes)
            if not apart and not stream.has_waited_for(other.stream, other.work):
                self.found[f"race of {mine.where} with {other.where}"] += 1
        uses[:] = [other for other in uses if not (
            other.stream is stream and mine.begin <= other.begin and other.end <= mine.end and writes >= other.writes)]
        uses.append(mine)

    def _of(self, tensor: Tensor) -> Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = Storage(Module.current)
            weakref.finalize(storage, self._free, key)
        return self._storages[key]

    def _pin(self, tensor: Tensor) -> None:
        self._of(tensor)
        self._pinned.add(tensor.untyped_storage()._cdata)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def _free(self, key: int) -> None:
        storage = self._storages.pop(key)
        self._pinned.discard(key)
        for use in storage.uses:
            if not storage.owner.has_waited_for(use.stream, use.work):
                self.found[f"race of freeing at {here()} with {use.where}"] += 1

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options, name = dict(options or {}), str(function)
        if function is torch.ops.prim.device.default:  # asked at every operator
            return function(*arguments)
        if function is torch.ops.aten._local_scalar_dense.default:
            return self._read(arguments[0])
        if name.startswith("aten.is_pinned"):
            return self._is_pinned(arguments[0])
        if name.startswith("aten._pin_memory"):
            return self.of_host(arguments[0])
        pinned = options.pop("pin_memory", False)
        result = function(*arguments, **options)
        if pinned:
            self._pin(result)
        taken, made = ([leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
                       for values in ((arguments, options), result))
        if name.startswith("c10d.") or all(tensor.device != self.device for tensor in (*taken, *made)):
            return result
        self._meet(name, taken, made, options.get("non_blocking") or (len(arguments) > 2 and arguments[2] is True))
        self._order(function, name, arguments, options, taken, made)
        return result

    def _read(self, number: Tensor) -> Any:
        """1, as of every number."""
        if number.device == self.device:
            self.note("read of a number")
            Module.current.synchronize()
        return 1.0 if number.dtype.is_floating_point else number.dtype is torch.bool or 1

    def _meet(self, name: str, taken: list[Tensor], made: list[Tensor], runs_on: bool) -> None:
        """Tensors of host and device, if there are both."""
        hosts = [tensor for tensor in (*taken, *made) if tensor.device != self.device and tensor.numel()]
        if name in ("aten._to_copy.default", "aten.copy_.default"):
            to_host = made[0].device != self.device
            for tensor in hosts:
                if not self._is_pinned(tensor) or (to_host and not runs_on):
                    self.note("read by a copy to the host" if to_host else "read of pageable memory")
        elif any(tensor.ndim for tensor in hosts) and not name.startswith(TAKE_NO_NUMBERS):
            self.note(f"mix in {name}")

    def _order(
        self, function: Any, name: str, arguments: tuple[Any, ...], options: dict[str, Any], taken: list[Tensor],
        made: list[Tensor],
    ) -> None:
        """What the current stream uses by this operator."""
        schema = function._schema
        given = {argument.name: value for argument, value in zip(schema.arguments, arguments)} | options
        changed = {id(leaf) for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
                   for leaf in tree_leaves(given.get(argument.name))}
        views = not changed and any(value.alias_info for value in schema.returns)
        if views or name.startswith(("aten.empty", "aten.new_empty")):
            for tensor in made:
                self._of(tensor)
            return
        work = Module.current.works()
        for tensor in taken:
            self.use(tensor, id(tensor) in changed, Module.current, work, name)
        known = set(map(id, taken))
        for tensor in made:
            if id(tensor) not in known:
                self.use(tensor, True, Module.current, work, name)


class Exchange:
    """Sends, receives and collectives of a stream of their own, as those of NCCL and HCCL."""

    def __init__(self, fake: FakeDevice) -> None:
        self._fake, self._stream = fake, Stream()

    def start(self, reads: list[Tensor], writes: list[Tensor], name: str) -> Done:
        for tensor in (*reads, *writes):
            assert tensor.is_contiguous(), f"{name} at {here()}"
            assert tensor.device == self._fake.device, f"{name} at {here()}"
            assert tensor.dtype != torch.float64, f"{name} at {here()}"  # HCCL has none
        self._stream.wait_stream(Module.current)
        work = self._stream.works()
        for tensors, changes in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._fake.use(tensor, changes, self._stream, work, name)
        return Done(self._stream.record_event(), [*reads, *writes])

    def collective(self, name: str) -> Callable[..., Any]:
        """A function of torch.distributed that fills its first argument from its second."""
        def call(output: Tensor, given: Tensor, *, group: Any = None, async_op: bool = False, **_: Any) -> Done | None:
            done = self.start([given], [output], name)
            if async_op:
                return done
            done.wait()
            return None

        return call


class Done(dist.Work):
    """What waits for an exchange; it holds its tensors until then."""

    def __init__(self, event: Event, tensors: list[Tensor]) -> None:
        super().__init__()
        self._event, self._tensors = event, tensors

    def wait(self, timeout: Any = None) -> bool:
        Module.current.wait_event(self._event)
        self._tensors = []
        return True


def here() -> str:
    """The innermost lines of this repository, or of what it calls, that lead here."""
    found, frame = [], sys._getframe(1)
    while frame.f_back is not None and len(found) < 3:
        file = frame.f_code.co_filename
        if file != __file__ and not any(part in file for part in ("/torch/", "importlib", "contextlib")):
            found.append(f"{file.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)
