"""Batches of samples drawn from a workload: text, images and videos from published distributions, cut into patches by
the rules of a model's family.

    source -> tokens of text, sizes of images, seconds and sizes of videos -> grids (data/families) -> Sample

A batch depends only on the seed and its own number, so runs of other lengths have the same batches.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dhp_ray.data.errors import RowError
from dhp_ray.data.families import FAMILIES
from dhp_ray.data.families.base import MIN_PIXELS, Clip, Family, Size
from dhp_ray.data.media import MediaLimits
from dhp_ray.errors import first_line
from dhp_ray.planner.plan.types import Grid, Sample
from dhp_ray.schema import ConfigError
from dhp_ray.simulate.settings import Numbers, SourceSettings, WorkloadSettings, file_of, sources_of

FRAMES_PER_SECOND = 30.0  # the frame rate of a video, before frames are taken from it
PIXELS, TENTH_S = 8, 0.1  # steps of drawn sides and seconds: many are then equal, and are cut only once
LOOKED_AT = 32  # the first batches, whose longest sequence ranks must hold; longer ones of later batches are left out
REDRAWS = 100  # the most draws of a batch; each draws anew the samples that were too long


class Drawn(NamedTuple):
    """A sample before its images and videos are cut into patches."""

    text_tokens: int
    sizes: tuple[Size, ...]


class Workload:
    """Samples of a workload for the models of a family."""

    def __init__(self, settings: WorkloadSettings, family: str) -> None:
        """`family`: a ModelShape's; an unknown one is text-only. ConfigError: a setting cannot be used."""
        shares, self._sources = zip(*sources_of(settings))
        self._shares = np.array(shares)
        self._settings = settings
        self._family = FAMILIES.get(family, Family)
        self._lengths = {source.path: _lengths(file_of(settings, source.path))
                         for source in self._sources if source.path}
        self._cut = cache(self._cut_up)

    def batch(self, number: int, num_samples: int, seed: int = 0) -> list[Sample]:
        """The samples of a batch. ConfigError: too few are short enough, or the family refuses an image."""
        random = np.random.default_rng([seed, number])
        found: list[Sample] = []
        for _ in range(REDRAWS):
            wanted = num_samples - len(found)
            chosen = random.choice(len(self._sources), wanted, p=self._shares)
            by_source = [self._drawn(source, int((chosen == place).sum()), random)
                         for place, source in enumerate(self._sources)]
            for place in chosen.tolist():
                sample = self._sample(self._sources[place], next(by_source[place]), number, len(found))
                if not self._settings.max_tokens or sample.num_tokens <= self._settings.max_tokens:
                    found.append(sample)
            if len(found) == num_samples:
                return found
        raise ConfigError(f"workload.max_tokens: got {self._settings.max_tokens}; allowed: more, or 0 (of "
                          f"{REDRAWS} draws too few were short enough)")

    def _drawn(self, source: SourceSettings, count: int, random: np.random.Generator) -> Iterator[Drawn]:
        if source.path:
            return (Drawn(tokens, ()) for tokens in random.choice(self._lengths[source.path], count).tolist())
        text = np.maximum(1, np.rint(drawn_numbers(source.text_tokens, count, random))).astype(np.int64)
        num_images, num_videos = (np.rint(drawn_numbers(numbers, count, random)).astype(np.int64)
                                  for numbers in (source.images, source.videos))
        width, height = (drawn_numbers(numbers, int(num_images.sum()), random)
                         for numbers in (source.image_width, source.image_height))
        images: list[Size] = list(zip(_in_steps(width, PIXELS), _in_steps(height, PIXELS)))
        seconds, wide, high = (drawn_numbers(numbers, int(num_videos.sum()), random)
                               for numbers in (source.video_seconds, source.video_width, source.video_height))
        frames = _in_steps(seconds * FRAMES_PER_SECOND, round(TENTH_S * FRAMES_PER_SECOND))
        clips: list[Size] = [Clip(*size, FRAMES_PER_SECOND)
                             for size in zip(_in_steps(wide, PIXELS), _in_steps(high, PIXELS), frames)]
        image, clip = ([0, *accumulate(counts.tolist())] for counts in (num_images, num_videos))
        return (Drawn(tokens, (*images[image[place] : image[place + 1]], *clips[clip[place] : clip[place + 1]]))
                for place, tokens in enumerate(text.tolist()))

    def _sample(self, source: SourceSettings, drawn: Drawn, batch: int, place: int) -> Sample:
        name = f"{source.name}-{batch}-{place}"
        if not drawn.sizes:
            return Sample(name, drawn.text_tokens)
        try:
            cut = [self._cut(size) for size in drawn.sizes]
        except RowError as error:
            raise ConfigError(f"workload: source {source.name}: {error}") from None
        return Sample(name, drawn.text_tokens, sum(tokens for tokens, _ in cut),
                      tuple(grid for _, grids in cut for grid in grids))

    def _cut_up(self, size: Size) -> tuple[int, tuple[Grid, ...]]:
        """Vision tokens and grids of an image or video."""
        settings = self._settings
        family = self._family(
            self._family.image_settings, MIN_PIXELS,
            settings.frame_pixels if isinstance(size, Clip) else settings.max_pixels,
            MediaLimits(video_fps=settings.video_fps, max_frames=settings.max_frames))
        written = family.written(size)
        return sum(written.runs), tuple(written.pieces)


class Batches:
    """The samples of each step; steps count from 1."""

    def __init__(self, workload: Workload, num_samples: int, num_batches: int, seed: int) -> None:
        """`num_batches`: the number of batches; 0: unlimited."""
        self._workload, self._num_samples, self._seed = workload, num_samples, seed
        self._drawn = lru_cache(LOOKED_AT)(self._batch)
        looked_at = range(1, min(num_batches or LOOKED_AT, LOOKED_AT) + 1)
        longest = {step: max(sample.num_tokens for sample in self._drawn(step)) for step in looked_at}
        self.longest_step = max(longest, key=lambda step: longest[step])
        self.longest_tokens = longest[self.longest_step]
        self.left_out: set[str] = set()

    def __call__(self, step: int) -> list[Sample]:
        samples = self._drawn(step)
        too_long = {sample.id for sample in samples if sample.num_tokens > self.longest_tokens}
        self.left_out |= too_long
        fitting = [sample for sample in samples if sample.id not in too_long]
        return fitting or self._drawn(self.longest_step)  # no batch is empty

    def _batch(self, step: int) -> list[Sample]:
        return self._workload.batch(step, self._num_samples, self._seed)


def drawn_numbers(numbers: Numbers, count: int, random: np.random.Generator) -> np.ndarray:
    """`count` numbers of a distribution, within its bounds."""
    if numbers.kind == "constant":
        found = np.full(count, numbers.mean)
    elif numbers.kind == "normal":
        found = random.normal(numbers.mean, numbers.deviation, count)
    elif numbers.kind == "lognormal":  # mean and deviation are those of the numbers, not of their logarithms
        variance = math.log1p((numbers.deviation / numbers.mean) ** 2)
        found = random.lognormal(math.log(numbers.mean) - variance / 2, math.sqrt(variance), count)
    else:
        low, high, weight = np.array(numbers.bins, dtype=np.float64).T
        chosen = random.choice(len(weight), count, p=weight / weight.sum())
        found = random.uniform(low[chosen], high[chosen])
    return np.clip(found, numbers.minimum, numbers.maximum)


def _in_steps(values: np.ndarray, step: int) -> list[int]:
    """Round to the nearest multiple of a step, at least one step."""
    return (step * np.maximum(1, np.rint(values / step)).astype(np.int64)).tolist()


def _lengths(path: str) -> np.ndarray:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            tokens = np.array([int(line["num_tokens"]) for line in csv.DictReader(file)], dtype=np.int64)
    except (OSError, UnicodeDecodeError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise ConfigError(f"workload: {path} cannot be read: {error.__class__.__name__}: {first_line(error)}; allowed: "
                          "a CSV file with whole numbers in the column num_tokens") from None
    if not len(tokens) or tokens.min() < 1:
        raise ConfigError(f"workload: {path} has no rows, or less than 1 token in one; allowed: rows with num_tokens "
                          "of at least 1")
    return tokens
