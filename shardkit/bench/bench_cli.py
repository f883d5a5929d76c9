"""``shardkit bench``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardkit import _cli_options as options

if TYPE_CHECKING:
    from shardkit.bench import Watcher


@click.command
@click.argument("workload", metavar="NAME|FILE.py[:FUNCTION][:KEY=VALUE,...]")
@options.strategies
@click.option("--precisions", default="", metavar="A,B", help="Each strategy in each of fp32, bf16, fp16.")
@click.option(
    "--baseline", metavar="STRATEGY", help="The first row.  [default: the first variant that shards nothing, in fp32]"
)
@click.option("--memory", metavar="SIZE", help="What each rank may take, such as 24GiB: the largest batch is searched.")
@click.option("--batch", type=click.IntRange(1), help="Micro-batch of a rank for all rows, instead of --memory.")
@options.processes
@options.accumulate
@click.option(
    "--items", default=2048, show_default=True, type=click.IntRange(1), help="Samples whose training time is told."
)
@click.option(
    "--eval-items",
    "evaluation_items",
    default=512,
    show_default=True,
    type=click.IntRange(0),
    help="Samples whose evaluation time is told; 0 leaves the evaluation out.",
)
@click.option("--steps", default=8, show_default=True, type=click.IntRange(1), help="Steps that are timed in a round.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Rounds.")
@options.device
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Seconds without a step of any rank after which a run hangs.",
)
@options.json
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write bench.json, bench.csv, bench.html and bench.png into this directory.",
)
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    workload: str,
    strategies: tuple[str, ...],
    precisions: str,
    as_json: bool,
    output: Path | None,
    **settings: Any,
) -> None:
    """Measure WORKLOAD under every strategy: the largest batch, speed, memory, and what they are over the baseline's.

    Give --memory, the budget of a rank, or --batch. Every row trains in fresh processes, round after round
    (docs/bench.md).

    Exit code: 0 if every row could be measured or says why it can't be, 1 if one failed, 2 if the command was refused.

    Example: shardkit bench t5-large --memory 24GiB --precisions fp32,bf16 --output results
    """
    import dataclasses
    import shlex
    import sys

    from shardkit.bench import bench as run
    from shardkit.bench import outputs
    from shardkit.bench.outputs import write
    from shardkit.cli import ended_by_sigterm, make_console
    from shardkit.tools import report
    from shardkit.tools.compare import split_strategies

    report.check(output)
    kinds = [kind.strip() for kind in precisions.split(",") if kind.strip()]
    with ended_by_sigterm(), _progress() as watcher:
        found = run(workload, split_strategies(strategies), precisions=kinds, watcher=watcher, **settings)
    found = dataclasses.replace(found, command=shlex.join(["shardkit", *sys.argv[1:]]))
    if output is not None:
        written = write.write(found, output)
        for path in written:
            click.echo(f"wrote {path}", err=True)
        if all(path.suffix != ".png" for path in written):
            click.echo(write.NO_PLOT, err=True)
    if as_json:
        click.echo(outputs.as_json(found))
    else:
        outputs.show(found, make_console())
    ctx.exit(found.exit_code)


@contextlib.contextmanager
def _progress() -> Iterator[Watcher]:
    """Show on stderr how far things are: bars on a terminal, a line for each part elsewhere."""
    from shardkit.bench import Watcher
    from shardkit.cli import steps_bar

    bar = steps_bar()

    class Printed(Watcher):
        def plan(self, parts: int) -> None:
            self._all = bar.add_task("parts", total=parts)

        def begin(self, what: str) -> None:
            self._name = what
            self._part = bar.add_task(what, total=None)

        def progress(self, done: int, of: int, what: str) -> None:
            bar.update(self._part, completed=done, total=of, description=f"{self._name}, {what}")

        def end(self, what: str) -> None:
            bar.remove_task(self._part)
            bar.advance(self._all)
            bar.console.print(what, markup=False, highlight=False, soft_wrap=True)

    with bar:
        yield Printed()
