"""What benchmarks/device.py is asked for: `key=value`, as for jobs/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMITS_S = {"tests": 150, "attention": 35, "step": 150, "synchronisations": 25, "parity": 40, "abort": 50, "nccl": 150}
"""Seconds after which a part is ended, in the order in which they run; ten minutes together."""
WORLD_LIMITS_S = {"degrees": 70, "engines": 70, "messages": 40, "ring": 60, "groups": 110, "killed": 45, "stopped": 45,
                  "speed": 160}
"""The same of `device.py world`."""
DEVICES = ("auto", "cuda", "cpu")
PRESETS = ("auto", "tiny", "2b", "3b", "7b")
DEFAULTS = {
    "device": ("auto", "cuda or cpu; auto takes cuda where there is one"),
    "preset": ("auto", "the model of `step` and `speed`: tiny, 2b, 3b, 7b; auto takes the largest that fits"),
    "parts": ("", "which parts run, by default all"),
    "out": ("runs/device", "the folder that results are written to"),
    "limit_s": ("0", "seconds of each part; 0: its own of ten minutes"),
    "groups": ("500", "process groups that `world` makes and drops, or as many as there is time for"),
}
"""Of every key: its default, and what it means."""


class SettingsError(ValueError):
    """One line: the key, the value, what would be accepted."""


@dataclass(frozen=True)
class Settings:
    """`device` is "cuda" or "cpu"; `out` is absolute."""

    device: str
    preset: str
    parts: tuple[str, ...]
    out: Path
    limit_s: float
    groups: int

    @classmethod
    def of(cls, arguments: Sequence[str], limits_s: Mapping[str, float] = LIMITS_S) -> Settings:
        """`limits_s`: of all parts there are. Raises SettingsError for what is not `key=value` or not accepted."""
        values = {key: default for key, (default, _) in DEFAULTS.items()}
        for argument in arguments:
            key, equals, value = argument.partition("=")
            if not equals or key not in DEFAULTS:
                raise SettingsError(f"got {argument!r}; allowed: key=value with key of {', '.join(DEFAULTS)}")
            values[key] = value
        parts = tuple(dict.fromkeys(filter(None, values["parts"].split(",")))) or tuple(limits_s)
        for key, given, allowed in (("device", [values["device"]], DEVICES), ("preset", [values["preset"]], PRESETS),
                                    ("parts", parts, tuple(limits_s))):
            for value in given:
                if value not in allowed:
                    raise SettingsError(f"{key}: got {value!r}; allowed: {', '.join(allowed)}")
        numbers: dict[str, Any] = {}
        for key, kind, wanted in (("limit_s", float, "seconds"), ("groups", int, "a number")):
            try:
                numbers[key] = kind(values[key])
            except ValueError:
                raise SettingsError(f"{key}: got {values[key]!r}; allowed: {wanted}") from None
        device = values["device"]
        if device == "auto":
            device = "cpu" if _without_cuda() else "cuda"
        return cls(device, values["preset"], parts, Path(values["out"]).expanduser().resolve(), **numbers)

    def arguments(self) -> list[str]:
        """What gives the same settings again."""
        return [f"device={self.device}", f"preset={self.preset}", f"parts={','.join(self.parts)}", f"out={self.out}",
                f"limit_s={self.limit_s}", f"groups={self.groups}"]

    def lack(self) -> str:
        """What keeps this machine from it; empty: nothing."""
        return _without_cuda() if self.device == "cuda" else ""

    def limit_of(self, part: str) -> float:
        """Seconds."""
        return self.limit_s or (LIMITS_S | WORLD_LIMITS_S)[part]


def _without_cuda() -> str:
    import torch

    return "" if torch.cuda.is_available() else "this machine has no CUDA device that torch can use"
