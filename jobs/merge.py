"""Merges a trained adapter into its base: `python jobs/merge.py adapter=runs/mine/model out=FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.streams import run_command  # all other imports come once signals are handled

HELP = """usage: python jobs/merge.py adapter=FOLDER [base=FOLDER] out=FOLDER

Writes a model folder: the base with the adapter (LoRA, in PEFT's form) in its weights, W + alpha / rank x B A in the
type that the base has, and the sizes of images from the adapter's folder where it has them; all else byte for byte.
Refuses an adapter of which a part finds no place.

  adapter=FOLDER  adapter_config.json and adapter_model.safetensors: model/ of a run with train.lora.rank, or PEFT's
  base=FOLDER     the model that it was trained on; without it, the one that the adapter names
  out=FOLDER      what is written; empty, or not there yet

Exit status: 0 on success, 2 on a bad argument, 1 on failure."""

NAMES = ("adapter", "base", "out")


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(HELP)
        return 0 if argv else 2
    from dhp_ray.config import local_path
    from dhp_ray.schema import ConfigError

    arguments = dict.fromkeys(NAMES, "")
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals or name not in NAMES:
            print(f"error: {' '.join(word.split())!r}: allowed: {', '.join(f'{name}=' for name in NAMES)}",
                  file=sys.stderr)
            return 2
        arguments[name] = value
    for name in ("adapter", "out"):
        if not arguments[name]:
            print(f"error: {name}: got nothing; allowed: a folder", file=sys.stderr)
            return 2
    try:
        paths = {name: local_path(name, value) for name, value in arguments.items() if value}
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _merge(str(paths["adapter"]), str(paths.get("base", "")), paths["out"])


def _merge(adapter: str, base: str, out: Path) -> int:
    from rich.progress import track

    from dhp_ray.errors import first_line
    from dhp_ray.model.files import ModelError
    from dhp_ray.model.merge import base_of, check_merge, merged_files  # torch is imported once all this is fine

    try:
        base = base or base_of(adapter)
        check_merge(adapter, base, out)
        changed = sum(track(merged_files(adapter, base, out), "merging", transient=True,
                            disable=not sys.stdout.isatty()))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"error: stopped before {out} was whole: Ctrl-C; nothing of it is left", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: out: {out} cannot be written: {first_line(error)}", file=sys.stderr)
        return 1
    print(f"{out}: {base} with {changed} weights changed by the adapter in {adapter}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda argv: ShutdownSignals("before the end").run(lambda: main(argv))))
