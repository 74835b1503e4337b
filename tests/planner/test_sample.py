"""Samples in plan files."""

import json
from dataclasses import asdict

from dhp_ray.planner.plan.types import Sample, samples_from_json, samples_to_json

SAMPLES = (Sample("a", 30), Sample("b", 2, 8, ((1, 4, 4), (2, 4, 6))))


def test_a_plan_file_has_every_field_of_a_sample():
    assert samples_to_json(SAMPLES) == [asdict(sample) for sample in SAMPLES]


def test_samples_are_read_as_they_were_written():
    assert samples_from_json(json.loads(json.dumps(samples_to_json(SAMPLES)))) == SAMPLES
