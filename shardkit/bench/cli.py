"""``shardkit max-batch``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardkit import _cli_options as options

if TYPE_CHECKING:
    from rich.table import Table

    from shardkit.bench import Listener, MaxBatch


@click.command("max-batch")
@click.argument("workload", metavar="NAME|FILE.py[:FUNCTION]")
@click.option("--strategy", required=True, help="A strategy, such as ddp, or a file of one.")
@click.option(
    "--memory",
    required=True,
    metavar="SIZE",
    help="What each rank may allocate for training, such as 24GiB: above what it holds after its imports.",
)
@options.processes
@click.option(
    "--global-batch",
    type=click.IntRange(1),
    help="Samples of a step on all ranks, held constant: micro-batches are accumulated for it.",
)
@click.option("--accumulate", type=click.IntRange(1), help="Micro-batches per step.  [default: the strategy's]")
@click.option("--max-batch", default=2**20, show_default=True, type=click.IntRange(1), help="The largest size to try.")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(3), help="Optimizer steps of a trial.")
@options.device
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Seconds without a step of any rank after which a trial hangs.",
)
@options.json
@click.pass_context
def max_batch(ctx: click.Context, /, workload: str, strategy: str, as_json: bool, **settings: Any) -> None:
    """Find the largest batch of WORKLOAD that trains within a budget of memory: it runs, and one more fails.

    Each trial is a fresh group of processes with a hard limit (docs/max-batch.md).

    Exit code: 0 if one was found, 1 if not even one sample fits, 2 if the workload can't be tried.

    Example: shardkit max-batch t5-tiny --strategy ddp --memory 512MiB
    """
    from shardkit._sizes import format_bytes
    from shardkit.bench import find_max_batch
    from shardkit.cli import ended_by_sigterm, make_console
    from shardkit.errors import OutOfMemoryError
    from shardkit.tools.report import to_json

    try:
        with ended_by_sigterm(), _progress() as listener:
            found = find_max_batch(workload, strategy, listener=listener, **settings)
    except OutOfMemoryError as error:
        if as_json:
            click.echo(to_json({"batch": 0, "error": str(error), "asked": error.asked}))
        else:
            click.echo(f"Out of memory: {error}", err=True)
        ctx.exit(1)
    if as_json:
        click.echo(to_json(found.to_dict()))
        return
    console = make_console()
    size = f"{format_bytes(found.memory)} for each of {found.processes} processes on {found.device}"
    console.print(f"{found.workload} under {found.strategy}, {size}", markup=False, highlight=False, soft_wrap=True)
    console.print(_table(found))
    several = "es" if found.accumulate > 1 else ""
    console.print(
        f"largest batch: {found.batch} samples, {found.accumulate} micro-batch{several} a step, {found.global_batch} "
        "samples a step on all ranks",
        highlight=False,
        soft_wrap=True,
    )
    for note in found.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _table(found: MaxBatch) -> Table:
    """Return the trials, in the order in which they were run."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for name in ("batch", "accumulate", "outcome", "peak MiB\nper rank", "seconds\nper step", "seconds"):
        table.add_column(name, justify="left" if name == "outcome" else "right", no_wrap=True)
    for trial in found.trials:
        table.add_row(
            str(trial.batch),
            str(trial.accumulate),
            Text(trial.outcome, style="green" if trial.fits else "yellow"),
            f"{max(trial.peak) / 2**20:.1f}" if trial.peak else "-",
            f"{trial.step_seconds[-1]:.3g}" if trial.step_seconds else "-",
            f"{trial.seconds:.1f}",
        )
    return table


@contextlib.contextmanager
def _progress() -> Iterator[Listener]:
    """Show on stderr which batch is tried: a bar on a terminal, a line for each trial elsewhere."""
    from shardkit.bench import Listener, Trial
    from shardkit.cli import steps_bar

    bar = steps_bar()

    class Printed(Listener):
        def plan(self, what: str) -> None:
            bar.console.print(f"planning {what}", markup=False, highlight=False)

        def begin(self, batch: int, accumulate: int) -> None:
            self._task = bar.add_task(f"batch {batch}", total=None)

        def progress(self, steps: int, of: int) -> None:
            bar.update(self._task, completed=steps, total=of)

        def end(self, trial: Trial) -> None:
            for task in bar.task_ids:
                bar.remove_task(task)
            text = f"batch {trial.batch}: {trial.outcome} in {trial.seconds:.0f} s"
            bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    with bar:
        yield Printed()
