"""What a run holds between two steps: its services, its history, and what belongs to one generation of the group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property

from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.comm.group_cache import GroupCacheState
from dhp_ray.config import Config
from dhp_ray.data.stream import Stream
from dhp_ray.planner.cost.origin import CostFile
from dhp_ray.planner.mode import Mode
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Plan, Sample
from dhp_ray.planner.timeline import apart_timeline
from dhp_ray.runtime.driver.dispatch import BatchReader, Dispatcher
from dhp_ray.runtime.driver.elastic import Failures, replica_ranks_of
from dhp_ray.runtime.driver.evaluation import HeldOut, HeldOutEvaluation
from dhp_ray.runtime.driver.feedback import CostRefits, Mirroring, SpeedMeter, TimeScale, least_error
from dhp_ray.runtime.driver.group import WorkerGroup
from dhp_ray.runtime.messages import Notice, Tell
from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.runtime.records.run_records import RunRecords
from dhp_ray.runtime.records.tensorboard import ScalarLog, StepPictures, cluster_text
from dhp_ray.runtime.strategy import Choice, ResolvedRun, Strategy

STUCK_SHARE = 0.75  # of the time within which a stuck rank must be found: checks come now and then
HANG_LAYERS = 60  # a rank may stand still for as long as so many layers should take
LOOKS_PER_HANG = 8  # the number of health checks in `elastic.hang_s` seconds while a step runs


@dataclass
class Generation:
    """What belongs to one membership of the group: it plans for these ranks, evaluates, measures their speeds."""

    number: int = 0
    choice: Choice = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    evaluation: HeldOutEvaluation = field(init=False)
    meter: SpeedMeter = field(init=False)


@dataclass
class History:
    """What has happened to the run so far, over all generations."""

    stream_lost: bool = False  # the stream's position says nothing about the next step
    mirroring_told: bool = False
    mode_told: Mode | None = None  # of the generation that was reported last
    failures: Failures = field(default_factory=Failures)
    evicted_slots: set[int] = field(default_factory=set)  # in which a worker was too slow once
    scale: TimeScale = field(default_factory=TimeScale)
    measured_cost: CostFile | None = None  # of planner.cost=measure
    refits: CostRefits = field(default_factory=CostRefits)
    stuck_s: float = 0.0  # how long a rank may stand still in the step that was begun last
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))  # of the last steps


@dataclass(frozen=True)
class Session:
    """A run that is ready for its next step: the services that it uses to its end, its history, its generation."""

    resolved: ResolvedRun
    group: WorkerGroup
    store: tuple[str, int]
    records: RunRecords
    checkpoints: Checkpoints
    scalars: ScalarLog
    watch: StepPictures
    stream: Stream
    held_out: HeldOut | None
    total_steps: int
    compiled: Future[float]  # done once the planner's loops are compiled, or read from their cache
    tell: Tell
    first_batch: Sequence[Sample] = ()  # of the run; empty if no modes are to be compared
    stop_reason: Callable[[], str] = lambda: ""
    history: History = field(default_factory=History)
    current: Generation = field(default_factory=Generation)

    @property
    def config(self) -> Config:
        """With the limits that stay for the run."""
        return self.resolved.config

    @property
    def strategy(self) -> Strategy:
        """How the ranks that the group has now train."""
        return Strategy(self.config, self.group.ranks, self.resolved.auto_tokens, self.resolved.image_limit,
                        self.first_batch, self.history.measured_cost)

    @property
    def stopping(self) -> str:
        """Why the run is to end early; empty: it is not."""
        return self.stop_reason()

    @property
    def max_workers(self) -> int:
        return self.config.cluster.max_workers or self.config.cluster.num_workers

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        return replica_ranks_of(self.group.nodes) if self.mirroring.every else ()

    @cached_property
    def reader(self) -> BatchReader:
        return BatchReader(self.stream, self.config)

    @cached_property
    def mirroring(self) -> Mirroring:
        return Mirroring(self.config.elastic.mirror_every_steps)

    @property
    def pool_groups(self) -> int:
        """How many process groups every rank keeps: what all devices hold."""
        return ACCELERATORS[self.group.members[0].described["device"]].pool_groups(self.group.memory_bytes)

    def stuck_s(self, plan: Plan) -> float:
        """Return how long a rank may stand still in a step: HANG_LAYERS layers, `comm.timeout_s` if unknown."""
        scale = self.history.scale.known()
        if scale is None:
            return self.config.comm.timeout_s
        longest_s = max((group.predicted_time_s for group in plan.groups), default=0.0)
        if apart := apart_timeline(plan):
            longest_s = max(longest_s, float(apart.encoded_s.max()), float((apart.end_s - apart.backward_s).max()))
        layer_s = scale * longest_s / self.group.num_layers
        return STUCK_SHARE * max(self.config.elastic.hang_s, HANG_LAYERS * layer_s)

    def choose_mode(self) -> Mode:
        """Choose the mode in which the group's ranks train. Call this whenever its members change."""
        self.current.choice = self.strategy.choose()
        return self.current.choice.mode

    def enter(self, generation: int) -> None:
        """Start planning for `generation`: the batches left by an earlier one, then the next ones."""
        self.current.number = generation
        self.records.cluster(generation, self.group.membership())
        self.scalars.text("cluster", cluster_text(self.group.membership()), self.records.last_step + 1)
        self.plan_for_group()

    def plan_for_group(self) -> None:
        self.group.look_s = self.config.elastic.hang_s / LOOKS_PER_HANG
        self.group.exchange_s = self.config.comm.timeout_s
        choice, train, strategy = self.current.choice, self.config.train, self.strategy
        # as resolved for this generation
        config = replace(self.config, train=replace(
            train, activation_checkpointing=choice.recomputation(train.activation_checkpointing)))
        limits, prior = replace(strategy, config=config).plan_limits(choice.mode)
        cost = self.history.refits.enter(prior, least_error(config, prior))
        ranks_for = strategy.ranks_for(self.max_workers) if strategy.auto_tokens else None
        cluster = ClusterSpec.of_nodes(self.group.nodes, limits.tokens, offload=limits.offload,
                                       recomputation=limits.recomputation)
        self.current.meter = SpeedMeter(self.group.size, self.config.elastic.evict_below)
        self.mirroring.enter()
        # one for all plans that the ranks are told to run
        pool = GroupCacheState(self.pool_groups if config.comm.transport == "pool" else 0)
        self.current.dispatcher = Dispatcher(
            self.reader, self.group, cluster, cost, config, pool, self.current.number, self.current.meter.planned,
            self.records.plan, self.history.scale.known, self.compiled, self.stop_reason, ranks_for,
            strategy.least_ranks())
        self.current.evaluation = HeldOutEvaluation(
            self.held_out, self.current.dispatcher, strategy.largest_admitted, self.tell)

    def report_mode(self) -> None:
        """Report which mode was chosen and why: at the start, and if a later generation's mode is another one."""
        told = self.history.mode_told
        choice, first = self.current.choice, self.resolved.choice
        if told is None and first.mode == choice.mode:
            choice = first  # it also names what was resolved at the start
        if choice.keys and choice.mode != told:
            self.history.mode_told = choice.mode
            self.records.event("mode", generation=self.current.number, sync=choice.mode.sync,
                               activation_checkpointing=choice.recomputation(
                                   self.config.train.activation_checkpointing),
                               expert_parallel=choice.mode.expert_parallel, auto=choice.keys, why=choice.why)
            self.tell(Notice(choice.line))

    def note_not_deleted(self, failures: Sequence[str]) -> None:
        for failure in failures:
            self.records.event("not_deleted", error=failure)

    def flush(self) -> None:
        """Bring what the run writes on an object store up to date, the ledger last."""
        self.scalars.flush()
        self.records.flush()

    def close(self, pictures_s: float | None = None) -> None:
        """Flush and close what the run writes, after the pictures under way or at most `pictures_s` seconds."""
        self.watch.close(pictures_s)
        self.scalars.close()
        self.records.close()
