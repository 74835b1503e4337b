"""Prints what planner and simulator need to know of a model, as a file of conf/model_shape:

    python benchmarks/model_shape.py FOLDER > conf/model_shape/NAME.yaml        FOLDER holds the model's config.json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.model.build import model_shape
from dhp_ray.model.files import ModelError


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 0 if {"-h", "--help"} & set(argv) else 2
    try:
        shape = model_shape("", argv[0], None)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name = "/".join(Path(argv[0]).absolute().parts[-2:])
    print(f"# {name}: what follows from its config.json ({shape.num_parameters():,} parameters)")
    print(shape.text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
