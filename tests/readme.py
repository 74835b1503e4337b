"""README.md and the pages of docs/ as tests read them: sections, tables and blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex

from dhp_ray.config import CONF

ROOT = CONF.parent
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
DOCUMENTS = "\n".join(PAGES.values())
CUT = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(match[1], match[2]) for match in CUT.finditer(DOCUMENTS)]
SHELL = [block for language, block in BLOCKS if not language]
COMMANDS = [line for block in SHELL for line in block.splitlines()]
COMMANDS += re.findall(r"`((?:python|ray|tensorboard|make|hf|pip) [^`]+)`", DOCUMENTS)


def section(title: str) -> str:
    """What stands below a heading: the whole page if it is that of a page, else up to the next one."""
    for page in PAGES.values():
        if page.startswith(f"# {title}\n"):
            return page.partition("\n")[2]
    return DOCUMENTS.partition(f"\n## {title}\n")[2].partition("\n## ")[0].partition("\n# ")[0]


def rows_of(table_in: str) -> list[list[str]]:
    """The cells of a section's tables, without heads."""
    lines = [line for line in section(table_in).splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def the_block(language: str, words: str) -> str:
    return next(block for kind, block in BLOCKS if kind == language and words in block)


def jobs(name: str, among: list[str] = COMMANDS) -> list[list[str]]:
    """The arguments of every `python jobs/NAME` that is shown, also behind `ray job submit ... --`."""
    found = [shlex.split(line.partition(f"jobs/{name}")[2], comments=True)
             for line in among if f"python jobs/{name}" in line]
    assert found, name
    return found
