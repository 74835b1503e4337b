"""Evaluate a model on held-out samples: `python jobs/evaluate.py model.path=FOLDER eval.path=FILE key=value ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.streams import run_command

PURPOSE = """Loss and generated answers of a model on held-out conversations: exact match, ANLS and token F1 of the
assistant's last turn, on any number of workers with a whole model each, or a part of one. Without --config:
conf/evaluate.yaml, which generates."""


def main(argv: list[str]) -> int:
    signals = ShutdownSignals("before the end")
    return signals.run(lambda: _main(argv, signals))


def _main(argv: list[str], signals: ShutdownSignals) -> int:
    from dhp_ray.config import EVALUATE, ConfigError, help_text, load  # once signals are handled

    try:
        if "--help" in argv or "-h" in argv:
            print(help_text(PURPOSE, argv, EVALUATE))
            return 0
        config = load(argv, EVALUATE)
        from dhp_ray.runtime.job.preflight import check_evaluation_here  # after --help, which needs nothing of it

        check_evaluation_here(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from dhp_ray.runtime.evaluate.evaluation import evaluate  # Ray takes seconds to import

    return evaluate(config, signals)


if __name__ == "__main__":
    sys.exit(run_command(main))
