"""Qwen3.5: images and videos as Qwen3-VL's."""

from __future__ import annotations

from typing import ClassVar

from dhp_ray.data.families.qwen3_vl import Qwen3VLFamily


class Qwen35Family(Qwen3VLFamily):
    """`VisionFamily` of Qwen3.5."""

    name: ClassVar[str] = "qwen3_5"
