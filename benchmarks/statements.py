"""Statements of a package, by file: what its syntax trees hold but docstrings.

    python benchmarks/statements.py dhp_ray/planner
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def statements(source: str) -> int:
    """Statements of a module, those inside others too."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)


def main(folders: list[str]) -> int:
    if not folders or {"-h", "--help"} & set(folders):
        print(__doc__)
        return 0 if folders else 2
    for folder in folders:
        counts = {path: statements(path.read_text()) for path in sorted(Path(folder).rglob("*.py"))}
        for path, count in counts.items():
            print(f"{count:5d} {path.relative_to(folder)}")
        print(f"{sum(counts.values()):5d} statements in {len(counts)} files of {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
