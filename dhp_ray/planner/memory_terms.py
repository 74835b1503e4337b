"""What memory is reckoned from, and its terms: the settings of a run, what a pack asks of a rank, bytes by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE_BYTES = {"fp32": 4, "bf16": 2}

Terms = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What of a run decides about its memory. `precision`: fp32 or bf16; `frozen`: parts that are not trained.

    `device`: whose attention kernel runs (cpu, cuda, npu). `largest_image`: vision tokens of the largest image or piece
    of a video, which one rank encodes; `image_limit`: what the run allows one (default: the pack's tokens).
    """

    sync: str
    world_size: int
    precision: str
    recomputes: bool
    frozen: tuple[str, ...] = ()
    device: str = "cuda"
    bucket_bytes: int = 64 * 2**20
    mirror_every_steps: str = "0"
    largest_image: int = 4096
    image_limit: int | None = None
    communicators_bytes: int = 0  # of all process groups


class PackLoad(NamedTuple):
    """One rank's part of a pack: its tokens, those of them that are vision tokens and those with a label; the patches
    that it encodes, how many sequences attention sees apart, and how many ranks share the pack."""

    tokens: int
    vision_tokens: int = 0
    valid_tokens: int = 0
    patches: int = 0
    sequences: int = 1
    degree: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes of each term: held throughout, added by a pack at its highest `moment`, and of host memory."""

    resident: Terms
    moment: str
    pack: Terms
    host: Terms

    @property
    def device_bytes(self) -> float:
        return sum(self.resident.values()) + sum(self.pack.values())

    def items(self) -> Iterator[tuple[str, str, float]]:
        """(where, term, bytes), as a report shows them."""
        for where, terms in (("resident", self.resident), (self.moment, self.pack), ("host", self.host)):
            yield from ((where, name, value) for name, value in terms.items() if value)

    def table(self) -> str:
        """Lines of term and GiB."""
        return "\n".join(f"{where:<32} {name:<36} {value / 2**30:9.3f} GiB" for where, name, value in self.items())
