"""Train a language or vision-language model: `ray job submit --working-dir . -- python jobs/train.py key=value ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.streams import run_command


def main(argv: list[str]) -> int:
    signals = ShutdownSignals()
    return signals.run(lambda: _main(argv, signals))


def _main(argv: list[str], signals: ShutdownSignals) -> int:
    from dhp_ray.config import ConfigError, help_text, load  # all imports below come once signals are handled

    try:
        if "--help" in argv or "-h" in argv:
            print(help_text("Train a language or vision-language model on a Ray cluster, with context-parallel groups "
                            "planned for every batch.", argv))
            return 0
        config = load(argv)
        from dhp_ray.runtime.job.preflight import check_here  # after --help, which needs nothing of it

        check_here(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from dhp_ray.runtime.messages import RunError
    from dhp_ray.runtime.records.lease import take_lease

    try:
        lease = take_lease(config.run.dir, signals.say)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with lease:
        from dhp_ray.runtime.job.head import begin

        begin()
        from dhp_ray.runtime.job.job import train  # Ray takes seconds to import; a local cluster starts meanwhile

        return train(config, lease, signals)


if __name__ == "__main__":
    sys.exit(run_command(main, goes_on=True))
