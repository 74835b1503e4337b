"""The cost of a pack, written out once more from the formulas at the top of `cost.py`.

Plain Python, one pack at a time. Nothing of the planner is imported but the plain data of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dhp_ray.planner import ClusterSpec, CostModel, Sample
from dhp_ray.planner.plan.cluster import LayerShare


class Batch(NamedTuple):
    """What is to be planned. A sequence is a row of `samples`."""

    samples: Sequence[Sample]
    cluster: ClusterSpec
    cost: CostModel

    def longest_first(self) -> list[int]:
        return sorted(range(len(self.samples)), key=lambda row: -self.samples[row].num_tokens)

    def num_tokens(self, rows: Sequence[int]) -> int:
        return sum(self.samples[row].text_tokens + self.samples[row].vision_tokens for row in rows)

    def holds(self, rows: Sequence[int], degree: int) -> bool:
        """Whether so many ranks hold a pack of these sequences."""
        cluster = self.cluster
        return self.num_tokens(rows) <= degree * max(
            cluster.tokens_per_rank, cluster.offload.tokens_per_rank, cluster.recomputation.tokens_per_rank)

    def pack_time_s(self, rows: Sequence[int], ranks: Sequence[int]) -> float:
        """Seconds of a pack of these sequences on these ranks."""
        degree, speed = len(ranks), self.speed(ranks)
        attention_s = self.cost.quadratic_s * sum(map(self.pairs, rows))
        language_s = attention_s + self.cost.linear_s * self.num_tokens(rows)
        exposed_s = self.exposed_s(self.num_tokens(rows), attention_s, ranks)
        encode_s = self.encode_s(rows, ranks)
        compute_s = language_s / (degree * speed) + encode_s
        once_s = compute_s + exposed_s + self.cost.pack_s
        rest_s = (language_s - attention_s) / (degree * speed) + self.cost.pack_s + self.latency_s(degree)
        return once_s + self.waits_s(rows, degree, compute_s) + self.recompute_s(rows, degree, rest_s, encode_s)

    def pairs(self, row: int) -> float:
        """What a sequence's attention grows with."""
        num_tokens = self.num_tokens([row])
        return num_tokens**2 + num_tokens * min(num_tokens, self.cost.attention_block)

    def encode_s(self, rows: Sequence[int], ranks: Sequence[int]) -> float:
        """Seconds of the member that takes longest for its images, each of which goes to who would end it first:
        longest first, or sequence after sequence, each one's longest first, whichever ends earlier.
        """
        by_sequence = []
        for row in rows:
            images_s = []
            for frames, height, width in self.samples[row].vision_grids:
                patches = height * width
                frame_s = self.cost.vision_quadratic_s * patches**2 + self.cost.vision_linear_s * patches
                images_s.append(frames * frame_s)
            by_sequence += sorted(images_s, reverse=True)
        if not by_sequence:
            return 0.0
        orders = sorted(by_sequence, reverse=True), by_sequence
        fullest_s = min(self.fullest_s(images_s, ranks) for images_s in orders)
        return fullest_s + self.cost.encoder_pass_s / self.speed(ranks)

    def fullest_s(self, images_s: Sequence[float], ranks: Sequence[int]) -> float:
        """Seconds of the member that takes longest, where images come in this order."""
        busy_s = dict.fromkeys(ranks, 0.0)
        for image_s in images_s:
            ends_s = {rank: busy_s[rank] + image_s / self.cluster.speeds[rank] for rank in ranks}
            first = min(ranks, key=lambda rank: ends_s[rank])
            busy_s[first] = ends_s[first]
        return max(busy_s.values())

    def exposed_s(self, num_tokens: int, attention_s: float, ranks: Sequence[int]) -> float:
        """Seconds of communication that no computation hides."""
        degree, cost = len(ranks), self.cost
        if degree == 1:
            return 0.0
        message_s = cost.comm_bytes_per_token * num_tokens / degree / self.bandwidth_bytes_per_s(ranks)
        if cost.communication == "all_to_all":
            return message_s + self.latency_s(degree)
        hidden_s = cost.overlap * (degree - 1) / degree * attention_s / (degree * self.speed(ranks))
        return max(0.0, (degree - 1) * message_s - hidden_s) + self.latency_s(degree)

    def latency_s(self, degree: int) -> float:
        """Seconds that messages take however short they are, of each turn of the ring; and what windows exchange."""
        turns = degree - 1 if self.cost.communication == "ring" else int(degree > 1)
        return turns * self.cost.latency_s + self.cost.window_s * (degree > 1)

    def waits_s(self, rows: Sequence[int], degree: int, compute_s: float) -> float:
        """Seconds of copies to host memory and back that no computation hides."""
        cost, tokens = self.cost, self.num_tokens(rows) / degree
        share = share_of(self.cluster.offload, tokens)
        if share == 0.0:
            return 0.0
        patches = sum(frames * height * width for row in rows
                      for frames, height, width in self.samples[row].vision_grids) / degree
        moved_s = share * (cost.offload_bytes_per_token * tokens + cost.offload_bytes_per_patch * patches
                           ) / cost.host_bytes_per_s
        out_s, back_s = cost.forward * compute_s, (1 - cost.forward) * compute_s
        return max(0.0, moved_s - out_s) + max(0.0, moved_s - back_s)

    def recompute_s(self, rows: Sequence[int], degree: int, rest_s: float, encode_s: float) -> float:
        """Seconds of the forward passes that run again: of all but attention, which take `rest_s` with their backward
        passes; of the encoder only if it has a backward pass.
        """
        of_images_s = self.cost.vision_forward * encode_s if self.cost.vision_forward < 1 else 0.0
        share = share_of(self.cluster.recomputation, self.num_tokens(rows) / degree)
        return share * (self.cost.forward * rest_s + of_images_s)

    def encoding_s(self, rows: Sequence[int], ranks: Sequence[int]) -> float:
        """Seconds in which the member that takes longest for its images encodes them, and encodes them again."""
        again = self.cost.vision_forward if self.cost.vision_forward < 1 else 0.0
        share = share_of(self.cluster.recomputation, self.num_tokens(rows) / len(ranks))
        return self.encode_s(rows, ranks) * (1 + share * again)

    def bandwidth_bytes_per_s(self, ranks: Sequence[int]) -> float:
        """One table for all, or one inside a node and one across nodes; a number is a table of one row."""
        table = self.cost.bandwidth_bytes_per_s
        if "intra" in table:
            inside = len({self.cluster.nodes[rank] for rank in ranks}) == 1
            table = table["intra" if inside else "inter"]
        if not isinstance(table, dict):
            return float(table)
        rows_above = [degree for degree in table if degree >= len(ranks)]
        return float(table[min(rows_above, default=max(table))])

    def speed(self, ranks: Sequence[int]) -> float:
        return min(self.cluster.speeds[rank] for rank in ranks)


def share_of(limit: LayerShare, tokens: float) -> float:
    """The share of a pack's layers that are relieved, with so many tokens a rank."""
    if limit.share == 0.0 or tokens <= limit.free_tokens:
        return 0.0
    return limit.share * (1 - limit.from_tokens / tokens) / (1 - limit.from_tokens / limit.tokens_per_rank)
