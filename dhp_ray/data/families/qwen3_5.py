"""Qwen3.5, dense and with experts: images and videos as Qwen3-VL's."""

from __future__ import annotations

from typing import ClassVar

from dhp_ray.data.families.qwen3_vl import Qwen3VLFamily


class Qwen35Family(Qwen3VLFamily):
    """`VisionFamily` of Qwen3.5."""

    name: ClassVar[str] = "qwen3_5"


class Qwen35MoeFamily(Qwen35Family):
    """`VisionFamily` of Qwen3.5 with experts."""

    name: ClassVar[str] = "qwen3_5_moe"
