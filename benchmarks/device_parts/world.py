"""The parts of `device.py world`: each runs on all ranks, in a world of its own (`torchrun.py`)."""

from __future__ import annotations

import gc
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device_parts import aborts, parity
from benchmarks.device_parts.attention import HEADS
from benchmarks.device_parts.outcomes import ROOT
from benchmarks.device_parts.record import CheckError, Record
from benchmarks.device_parts.settings import Settings
from benchmarks.device_parts.step import LARGEST_LOSS_ERROR
from benchmarks.device_parts.timing import compute_type, timed
from benchmarks.device_parts.torchrun import TIMEOUT, joined, place, precision_of
from benchmarks.device_parts.workload import BATCHES, Batch, OwnStep, batch_of, choose_preset, config_of
from benchmarks.planner import bimodal
from dhp_ray.comm.device import Accelerator
from dhp_ray.comm.pack_communicator import PackCommunicator, Pending
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import gather_over_ranks, numbers_of_ranks
from dhp_ray.comm.transport import Transport
from dhp_ray.comm.world import meet
from dhp_ray.model.attention import PackContext, ring_attention
from dhp_ray.model.build import meta_model
from dhp_ray.model.fused import operators_of
from dhp_ray.model.layout import PackLayout
from dhp_ray.planner import ClusterSpec, CostModel, Plan, plan_batch
from dhp_ray.planner.cost.derived import derived_cost, described
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.plan.types import Pack
from tests.async_backend.blocked import store

MOST_DEGREE = 8
STEPS = 3
MESSAGE_BYTES = {"cuda": (2**12, 2**16, 2**20, 2**24, 2**26), "cpu": (2**12, 2**16, 2**20)}
RING_TOKENS = {"cuda": 8192, "cpu": 128}
"""Of each rank."""
TIMES = 12
"""Calls of which the first two do not count."""
SHARE_OF_LIMIT = 0.6
"""For the process groups of part `groups`; the rest is for the start."""
SYNCS = ("micro_batch", "step")
TOKENS_PER_RANK = {"cuda": 16384, "cpu": 128}
SEQUENCES_PER_RANK, CPU_SHORTER = 8, 64
"""Lengths of a batch are those of `benchmarks/planner.py`; on the CPU divided by the second number."""


def run(settings: Settings, record: Record) -> str:
    """A rank that ends takes with it what it has not sent yet: all ranks that are left end together."""
    part, (rank, num_ranks) = record.tree["part"], place()
    said, wrong = "", None
    try:
        said = PARTS[part](settings, record)
    except CheckError as error:
        wrong = error
    meet(store(), f"{part}/end", part, rank, range(num_ranks - (part in LOSES_ONE)), TIMEOUT)
    if wrong:
        raise wrong
    return said


def degrees(settings: Settings, record: Record) -> str:
    accelerator = joined(settings, "degrees")
    rows = parity.degrees(accelerator, precision_of(settings), min(MOST_DEGREE, dist.get_world_size()))
    return parity.written(record, rows, accelerator.backend, precision_of(settings)) if rows else ""


def engines(settings: Settings, record: Record) -> str:
    """Steps of the preset tiny with text and images in both modes, beside those of one rank that has all packs."""
    joined(settings, "engines")
    device, precision, num_ranks = torch.device(settings.device), precision_of(settings), dist.get_world_size()
    batch = batch_of(BATCHES["cpu"]["1k"], torch.device("cpu"), True)  # with small images everywhere
    ranks = [tuple(range(num_ranks - 1)), (num_ranks - 1,), (0,), tuple(range(1, num_ranks))]
    make = partial(OwnStep, config_of("tiny"), device, precision, recomputes=True)
    wanted, wrong = trained(make(), planned(batch, 1, "step", [(0,)] * 4), batch), []
    record.table(["sync", "losses", "gradient norms"])
    for sync in SYNCS:
        found = trained(make(world=dist.group.WORLD, sync=sync), planned(batch, num_ranks, sync, ranks), batch)
        off = {what: max(abs(one / other - 1.0) for one, other in zip(found[what], wanted[what])) for what in wanted}
        record.row(sync, off, [sync, *(f"{error:.1e}" for error in off.values())])
        wrong += [f"{sync}: {what} {error:.1e}" for what, error in off.items()
                  if not error < LARGEST_LOSS_ERROR[precision]]
    if wrong:
        raise CheckError(f"steps are not those of one rank: {', '.join(wrong)}")
    return f"{STEPS} steps of both modes on {num_ranks} ranks as on one"


def planned(batch: Batch, num_ranks: int, sync: str, ranks: Sequence[tuple[int, ...]]) -> Plan:
    """Four packs of these ranks, two in a micro-batch."""
    samples, groups = tuple(sample for sample, _ in batch), []
    for number, members in enumerate(ranks):
        rows = tuple(range(len(samples))[number::4])
        images = sum(len(samples[row].vision_grids) for row in rows)
        groups.append(Pack(members, rows, 1.0, 0.0, number // 2 if sync == "micro_batch" else 0,
                           tuple(members[image % len(members)] for image in range(images))))
    plan = Plan("device.py", sync, ClusterSpec(num_ranks, num_ranks, 4096), samples, tuple(groups), 1.0, 1.0)
    plan.validate()
    return plan


def trained(step: OwnStep, plan: Plan, batch: Batch) -> dict[str, list[float]]:
    """By step, of which the later ones have the weights of the updates before."""
    results = [step.run_plan(plan, batch) for _ in range(STEPS)]
    step.release()
    return {"losses": [result.loss_sum for result in results], "norms": [result.gradient_norm for result in results]}


def messages(settings: Settings, record: Record) -> str:
    accelerator = joined(settings, "messages")
    device, link, world = accelerator.torch_device(), ring_of(accelerator), dist.group.WORLD
    assert world is not None
    record.table(["bytes", "gather of all ms", "GB/s a rank", "ring ms", "GB/s a rank"])
    times = {}
    for size in MESSAGE_BYTES[device.type]:
        sent = torch.zeros(size // 4 // link.size, device=device)
        gather_s = median_s(partial(gather_over_ranks, sent, world), device)
        ring_s = median_s(partial(pass_on, link, torch.zeros(size // 4, device=device)), device)
        rates = (size * (1 - 1 / link.size) / gather_s, size / ring_s)
        times[size] = {"gather_s": gather_s, "ring_s": ring_s, "gather_rate": rates[0], "ring_rate": rates[1]}
        record.row(str(size), times[size], [str(size), f"{1e3 * gather_s:.3f}", f"{rates[0] / 1e9:.2f}",
                                            f"{1e3 * ring_s:.3f}", f"{rates[1] / 1e9:.2f}"])
    least, most = times[min(times)], times[max(times)]
    return ", ".join(f"{kind} {1e6 * least[f'{kind}_s']:.0f} us, {most[f'{kind}_rate'] / 1e9:.4g} GB/s"
                     for kind in ("gather", "ring"))


def ring_of(accelerator: Accelerator) -> PackCommunicator:
    """The link of a pack on all ranks."""
    rank, num_ranks = place()
    return Transport("parent", rank, num_ranks, accelerator, 1, TIMEOUT).link(range(num_ranks), 0)


def pass_on(link: PackCommunicator, sent: torch.Tensor, times: int = 1) -> None:
    for _ in range(times):
        link.exchange([(sent, (link.index + 1) % link.size)],
                      [(torch.empty_like(sent), (link.index - 1) % link.size)]).wait()


def median_s(call: Callable[[], Any], device: torch.device) -> float:
    """The same number of calls on every rank."""
    return statistics.median([timed(call, device) for _ in range(TIMES)][2:])


class Silent(PackCommunicator):
    """A link over which nothing is sent: what arrives is whatever was in the memory."""

    def exchange(self, sends: Any, receives: Any, tag: int = 0) -> Pending:
        return Pending(self.progress, [], [])


def ring(settings: Settings, record: Record) -> str:
    """Attention of one sequence over all ranks, as the model calls it."""
    accelerator = joined(settings, "ring")
    device, link = accelerator.torch_device(), ring_of(accelerator)
    heads, key_heads, width = HEADS[device.type]
    num_tokens = RING_TOKENS[device.type]
    layout = PackLayout((num_tokens * link.size,), link.size)
    q, k, v, slope = (torch.randn(1, count, num_tokens, width, device=device).to(compute_type(device)).requires_grad_()
                      for count in (heads, key_heads, key_heads, heads))
    silent = Silent(link.ranks, link.ranks[link.index], None)
    seconds = {}
    for name, context in (("with", PackContext(layout, link)), ("without", PackContext(layout, silent))):
        call = partial(ring_attention, q, k, v, width**-0.5, context)
        out, gradient = call(), slope.detach().transpose(1, 2)
        back = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
        seconds[name] = [median_s(run, device) for run in (call, back)]
    kv = torch.zeros(2, num_tokens, key_heads, width, device=device, dtype=q.dtype)
    keys_s = median_s(partial(pass_on, link, kv, link.size - 1), device)
    gradients_s = median_s(partial(pass_on, link, kv.float(), link.size), device)
    seconds["alone"] = [keys_s, keys_s + gradients_s]
    record.table(["pass", "with the exchange ms", "without ms", "the exchange alone ms", "of it hidden"])
    said = []
    for number, name in enumerate(("forward", "backward")):
        together, without, alone = (seconds[kind][number] for kind in ("with", "without", "alone"))
        hidden = 1 - (together - without) / alone
        record.row(name, {"with_s": together, "without_s": without, "alone_s": alone, "hidden": hidden},
                   [name, *(f"{1e3 * value:.3f}" for value in (together, without, alone)), f"{hidden:.2f}"])
        said.append(f"{name} {1e3 * together:.3g} ms, {hidden:.0%} of the exchange hidden")
    return f"{num_tokens} tokens a rank: {'; '.join(said)}"


def groups(settings: Settings, record: Record) -> str:
    accelerator = joined(settings, "groups")
    device, (rank, num_ranks) = accelerator.torch_device(), place()

    def made_s() -> float:
        begin = time.monotonic()
        Transport("parent", rank, num_ranks, accelerator, 1, TIMEOUT).close()
        return time.monotonic() - begin

    slowest_s = max(numbers_of_ranks(torch.tensor(max(made_s() for _ in range(3))), dist.group.WORLD, Progress(device)))
    count = max(1, min(settings.groups, int(SHARE_OF_LIMIT * settings.limit_of("groups") / slowest_s)))
    before = held(device)
    times = [made_s() for _ in range(count)]
    more = {name: value - before[name] for name, value in held(device).items()}
    record.table(["groups", "median ms", "longest ms", *more])
    median_ms, longest_ms = 1e3 * statistics.median(times), 1e3 * max(times)
    record.row("groups", {"count": count, "median_ms": median_ms, "longest_ms": longest_ms, **more},
               [str(count), f"{median_ms:.1f}", f"{longest_ms:.1f}", *map(str, more.values())])
    if more["files"] > count // 10 or more["threads"] > count // 10:
        raise CheckError(f"{count} groups left {more['files']} files and {more['threads']} threads")
    return (f"{count} of {num_ranks} ranks, {median_ms:.1f} ms each; left "
            + ", ".join(f"{value} {name}" for name, value in more.items()))


def held(device: torch.device) -> dict[str, int]:
    """What this process has open, its threads, and what is used of its device."""
    free, total = torch.cuda.mem_get_info() if device.type == "cuda" else (0, 0)
    return {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
            "device bytes": total - free}


def killed(settings: Settings, record: Record) -> str:
    return lost(settings, record, "killed", signal.SIGKILL)


def stopped(settings: Settings, record: Record) -> str:
    return lost(settings, record, "stopped", signal.SIGSTOP)


def lost(settings: Settings, record: Record, part: str, by: signal.Signals) -> str:
    """What becomes of the other ranks when the last one is gone."""
    accelerator = joined(settings, part, emulates=True)
    device, (rank, num_ranks) = accelerator.torch_device(), place()
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == num_ranks
    if rank == num_ranks - 1:
        record.end("done", f"{part} itself", 0.0)
        os.kill(os.getpid(), by)
    record.table(aborts.HEAD)
    wait = aborts.ended_wait(device)
    if wrong := aborts.written(record, f"{accelerator.backend}, peer is {part}", settings.device, wait):
        raise CheckError("; ".join(wrong))
    return f"rank 0 saw nothing for {wait.answers.blocked_s:.1f} s; its abort took {1e3 * wait.ended_s:.0f} ms"


def speed(settings: Settings, record: Record) -> str:
    """A batch of long and short sequences of text. `static_best` on FSDP2 is what others call context parallelism: one
    degree for all packs, the best one by the same costs.
    """
    accelerator = joined(settings, "speed")
    device, precision, num_ranks = accelerator.torch_device(), precision_of(settings), dist.get_world_size()
    preset = choose_preset(settings.preset, device, num_ranks)
    lengths = bimodal(SEQUENCES_PER_RANK * num_ranks, num_ranks) // (CPU_SHORTER if device.type == "cpu" else 1)
    batch = batch_of(lengths.clip(2).tolist(), device, False)
    tokens, losses, rates = sum(sample.num_tokens for sample, _ in batch), {}, {}
    record.tree |= {"preset": preset, "precision": precision, "tokens": tokens}
    record.table(["sync", "planner", "tokens/s", "step s", "predicted s", "degrees", "loss"])
    for sync in SYNCS:
        step = OwnStep(config_of(preset), device, precision, recomputes=device.type == "cuda",
                       fused=operators_of(device.type), world=dist.group.WORLD, sync=sync)
        for planner in ("dhp", "static_best"):
            found: list[Plan | None] = [None]
            if step.rank == 0:
                cluster = ClusterSpec(num_ranks, int(os.environ["LOCAL_WORLD_SIZE"]), TOKENS_PER_RANK[device.type])
                found = [plan_batch([sample for sample, _ in batch], cluster, cost_of(accelerator, preset, sync),
                                    planner=planner, sync=sync)]
            dist.broadcast_object_list(found, device=device)
            plan = found[0]
            assert plan is not None
            results = [step.run_plan(plan, batch, 0.0) for _ in range(3)]  # weights stay as they are
            step_s = statistics.median(result.step_time_s for result in results[1:])
            name, spans = f"{sync}, {planner}", sorted({len(group.ranks) for group in plan.groups})
            losses[name], rates[name] = results[0].loss_sum / results[0].num_valid_tokens, tokens / step_s
            record.row(name, {"step_s": step_s, "loss": losses[name], "predicted_s": plan.predicted_time_s},
                       [sync, planner, f"{rates[name]:.0f}", f"{step_s:.3f}", f"{plan.predicted_time_s:.3f}",
                        " ".join(map(str, spans)), f"{losses[name]:.5f}"])
        step.release()
        del step
        gc.collect()
    if max(losses.values()) / min(losses.values()) - 1 > LARGEST_LOSS_ERROR[precision]:
        raise CheckError(f"losses of the same weights differ: {losses}")
    return f"{preset}, {tokens} tokens: " + "; ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items())


def cost_of(accelerator: Accelerator, preset: str, sync: str) -> CostModel:
    """Derived, for this device; on the CPU that of the repository."""
    device = described(ROOT / "conf" / "device", accelerator.model_name())
    if device is None:
        return CostModel.load(ROOT / "conf" / "cost" / f"{accelerator.name}.yaml")
    num_ranks = dist.get_world_size()
    memory = MemoryModel(meta_model(config_of(preset)).shape,
                         MemorySettings(sync=sync, world_size=num_ranks, precision="bf16", recomputes=True))
    return derived_cost(memory, device, -(-num_ranks // int(os.environ["LOCAL_WORLD_SIZE"])),
                        operators_of(accelerator.name) is not None)


LOSES_ONE = ("killed", "stopped")
PARTS: dict[str, Callable[[Settings, Record], str]] = {
    "degrees": degrees, "engines": engines, "messages": messages, "ring": ring, "groups": groups, "killed": killed,
    "stopped": stopped, "speed": speed}
