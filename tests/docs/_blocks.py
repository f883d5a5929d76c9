"""The code blocks of README and docs, and what comments above them ask of the test that runs them.

A comment stands right above a block and isn't seen on the page:

- ``<!-- setup: NAME -->``: a Python block begins a program, over what ``setups.NAME`` defines. Python blocks below it
  go on in the same names until another begins one. A page's first block without it has the setup ``nothing``.
- ``<!-- run: NAME -->``: the commands of the block are run, in a folder that ``setups.NAME`` has prepared. The commands
  of other blocks are parsed, and their strategies, workloads, versions and sizes read.
- ``<!-- file: NAME -->``: the block is the content of a file, which the page's commands and later blocks find.
- ``<!-- slow: REASON -->``: it is run among the slow tests.
- ``<!-- not run: REASON -->``: it isn't; ``test_code_blocks.EXEMPT`` lists these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
MARKS = {"setup", "run", "file", "slow", "not run"}
OTHERS = {"main", "test", "loop", "workload", "rows", "then"}
"""Marks of other tests, and of .ci/run."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Of its first line within the page, from 1."""
    language: str
    text: str
    marks: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Program:
    """Python blocks of a page that share their names."""

    setup: str
    blocks: tuple[Block, ...]

    @property
    def where(self) -> str:
        return self.blocks[0].where

    @property
    def slow(self) -> bool:
        return any("slow" in block.marks for block in self.blocks)


@cache
def pages() -> list[str]:
    """Return README and the pages of the documentation, by their paths within the repository."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
    found += sorted((ROOT / "docs").rglob("*.md"))
    # What the site is made of has directives of Sphinx, which its build runs; an example of a plugin has its own tests.
    left_out = ("docs/api/", "docs/examples/", "docs/navigation.md", "docs/commands.md")
    names = [str(path.relative_to(ROOT)) for path in found]
    return [name for name in names if not name.startswith(left_out)]


@cache
def blocks(page: str) -> list[Block]:
    """Return the code blocks of a page, in order."""
    tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text())
    found = []
    for number, token in enumerate(tokens):
        if token.type in ("fence", "code_block"):
            marks = {}
            for before in reversed(tokens[:number]):
                comment = re.fullmatch(r"<!--\s*([\w ]+?)(?::\s*(.*?))?\s*-->\n?", before.content)
                if before.type != "html_block" or comment is None:
                    break
                marks[comment[1]] = comment[2] or ""
            assert token.map is not None
            found.append(Block(page, token.map[0] + 2, token.info, token.content, marks))
    return found


@cache
def programs(page: str) -> list[Program]:
    """Return the programs of a page, in order."""
    found: list[Program] = []
    for block in blocks(page):
        if block.language == "python" and "not run" not in block.marks:
            if "setup" in block.marks or not found:
                found.append(Program(block.marks.get("setup", "nothing"), (block,)))
            else:
                found[-1] = Program(found[-1].setup, (*found[-1].blocks, block))
    return found


def write_files(page: str, folder: Path) -> None:
    """Write the page's files into a folder, and the programs of its folder of examples.

    The built-in example of a workload is ``train.py`` on pages without one.
    """
    for source in ("docs/workloads.md", page):
        for block in blocks(source):
            if "file" in block.marks:
                (folder / block.marks["file"]).write_text(_prelude(block) + block.text)
    for path in examples(page).glob("*.py"):
        (folder / path.name).write_text(path.read_text())


def examples(page: str) -> Path:
    """Return the folder of a page's programs, which needn't exist."""
    return ROOT / "docs/examples" / Path(page).stem


def _prelude(block: Block) -> str:
    setup = block.marks.get("setup", "nothing")
    if block.language != "python" or setup == "nothing":
        return ""
    return f"from tests.docs import setups\n\nglobals().update(next(setups.{setup}()))\n"


@cache
def inline(page: str) -> list[tuple[int, str]]:
    """Return line and text of all code within a page's running text and tables."""
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())
    return [
        ((token.map or (0, 0))[0] + 1, child.content)
        for token in tokens
        for child in token.children or ()
        if child.type == "code_inline"
    ]
