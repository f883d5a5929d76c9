"""The command line. Each command imports what it needs when it runs: ``--help`` loads neither torch nor rich."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardkit import __version__
from shardkit import _cli_options as options
from shardkit.bench.bench_cli import bench
from shardkit.bench.cli import max_batch
from shardkit.errors import ShardkitError
from shardkit.parity.cli import parity
from shardkit.planner.cli import plan
from shardkit.scaffold.cli import new_backend
from shardkit.testing.cli import conformance

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from shardkit.tools.compare import Listener


class _Refusal(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShardkitError as error:
            raise _Refusal(str(error)) from error
        except KeyboardInterrupt:
            # As of a program that the signal ended: 1 would say that something was found.
            sys.exit(128 + signal.SIGINT)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="shardkit")
def main() -> None:
    """One training loop over every sharding library: compare them, list them, check the machine."""


@main.command
@click.option(
    "--workload",
    default="t5-tiny",
    show_default=True,
    metavar="NAME|FILE.py[:FUNCTION][:KEY=VALUE,...]",
    help="What to train, such as t5-tiny, or a function of your own (docs/workloads.md).",
)
@options.strategies
@click.option("--steps", default=30, show_default=True, type=click.IntRange(1), help="Optimizer steps.")
@options.processes
@click.option(
    "--batch-size", default=8, show_default=True, type=click.IntRange(1), help="Samples in a micro-batch of one rank."
)
@options.accumulate
@click.option("--max-grad-norm", type=float, help="Clip the global L2 norm of the gradient.  [default: not at all]")
@click.option("--seed", type=int, help="Seed of the random generators, plus the rank, such as those of dropout.")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where to train; auto: on GPUs if each rank can have one.",
)
@click.option(
    "--timeout",
    default=300.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Seconds that a strategy may take before it is given up.",
)
@options.json
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write compare.json and compare.png into this directory.",
)
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    workload: str,
    strategies: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    **settings: Any,
) -> None:
    """Train a small model on real text under every strategy, and compare with plain torch.

    The reference is one process that trains on the whole global batch without shardkit. A row says how far a
    strategy's losses lie from it, how many samples per second all ranks took, and the peak memory of a rank.

    Exit code: 0 if all strategies agree with the reference, 1 if one differs, 2 if one could not run.

    Example: shardkit compare --strategies ddp,deepspeed:stage=3 --output results
    """
    from shardkit.tools import report
    from shardkit.tools.compare import compare, split_strategies

    report.check(output)
    with ended_by_sigterm(), _progress(settings["steps"]) as listener:
        found = compare(workload, split_strategies(strategies), listener=listener, **settings)
    if output is not None:
        for path in report.write(found, output):
            click.echo(f"wrote {path}", err=True)
    if as_json:
        click.echo(report.as_json(found))
    else:
        console = make_console()
        console.print(report.table(found))
        for line in report.notes(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    ctx.exit(found.exit_code)


@main.command
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")
def backends(name: str | None, as_json: bool) -> None:
    """List the backends, what each shards, and how to install what is missing; or the options of backend NAME.

    Example: shardkit backends deepspeed
    """
    from shardkit.tools import listing
    from shardkit.tools.report import to_json

    found: Any = listing.listing() if name is None else listing.options(name)
    if as_json:
        click.echo(to_json(found))
        return
    console = make_console()
    for part in listing.tables(found) if name is None else listing.option_tables(found):
        console.print(part)
    for line in listing.wrappers() if name is None else ():
        console.print(line, markup=False, highlight=False)


@main.command
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check the machine for what makes training hang, fail or compute wrong numbers, and say what to do.

    Exit code: 0 if all is well, 1 if there is a problem.

    Example: shardkit doctor --json
    """
    import dataclasses

    from shardkit.tools import doctor
    from shardkit.tools.report import to_json

    findings = doctor.examine()
    if as_json:
        click.echo(to_json([dataclasses.asdict(finding) for finding in findings]))
    else:
        make_console().print(doctor.table(findings))
    ctx.exit(1 if any(finding.level == "problem" for finding in findings) else 0)


@main.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--workload",
    metavar="NAME|FILE.py[:FUNCTION][:KEY=VALUE,...]",
    help="The model and the optimizer, as they were built when the source was written: they tell the names of the "
    "optimizer's parameters where the source lists them by number.",
)
@click.option(
    "--names",
    metavar="FILE.json|order",
    help="The names instead: a JSON list with a list of names for each group; or 'order', if each group was built in "
    "the order of the model's own parameters.",
)
@click.option(
    "--optimizer",
    "optimizer_class",
    metavar="CLASS",
    help="The optimizer's class, such as AdamW: sessions with another then refuse the checkpoint.",
)
@click.option("--steps", type=click.IntRange(0), help="Steps that moved the weights, where the source doesn't say.")
@click.option(
    "--allow-pickle", is_flag=True, help="Let the source's files run code of their own: only for those that you trust."
)
@options.json
def import_(source: Path, directory: Path, workload: str | None, names: str | None, as_json: bool, **how: Any) -> None:
    """Write a checkpoint of another library, SOURCE, as one of shardkit's into DIRECTORY.

    SOURCE is a file that torch.save wrote, of a model's state dict or of a dictionary with the model's and the
    optimizer's; a folder of torch.distributed.checkpoint; or what an installed plugin reads, such as a folder of its
    library's checkpoints. Every strategy goes on from what is written, with any number of ranks (docs/import.md).

    Exit code: 0 if it was written, 2 if the source can't be imported; nothing is written then.

    Example: shardkit import run/global_step500 checkpoints
    """
    from shardkit import workloads
    from shardkit.checkpoints import _import
    from shardkit.checkpoints._names import read_names
    from shardkit.tools.report import to_json

    if names is not None:
        how["names"] = read_names(names)
    if workload is not None:
        made = workloads.load(workload)
        how |= {"model": made.model, "optimizer": made.optimizer}
    with ended_by_sigterm(), _bytes(f"import {source.name}") as progress:
        found = _import.run(source, directory, progress=progress, **how)
    if as_json:
        click.echo(to_json({**found._asdict(), "path": str(found.path)}))
        return
    click.echo(f"wrote {found.path}: {found.kind}, after {found.step} steps, {found.weights} tensors of the model")
    if found.names:
        click.echo(f"the optimizer, of {found.parameters} parameters; their names are from {found.names}")
    else:
        click.echo("no optimizer's state: only sessions without an optimizer load it")
    for key in found.left_out:
        click.echo(f"left out: {key!r}, which a checkpoint can't hold")


@main.command
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--tensors", is_flag=True, help="List all tensors, with dtypes, shapes and sizes.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Read all of it and compare checksums.")
@options.json
@click.pass_context
def inspect(ctx: click.Context, directory: Path, tensors: bool, verify: bool, as_json: bool) -> None:
    """Tell what a checkpoint holds, or all those in DIRECTORY, and whether they are whole.

    Exit code: 0 if all are whole, 1 if one is damaged, 2 if there is none or it is of another format.

    Example: shardkit inspect checkpoints/step-00000100 --tensors
    """
    from shardkit.checkpoints import checkpoints
    from shardkit.checkpoints import inspect as inspect_one
    from shardkit.tools import inspection
    from shardkit.tools.report import to_json

    found = []
    for path in checkpoints(directory) or [directory]:
        with _bytes(f"verify {path.name}") as progress:
            found.append(inspect_one(path, verify=verify, progress=progress))
    if as_json:
        click.echo(to_json({"checkpoints": [inspection.facts(one, tensors=tensors) for one in found]}))
    else:
        inspection.show(found, make_console(), tensors=tensors)
    ctx.exit(1 if any(one.damage for one in found) else 0)


@main.command
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="What weights of floating point are written in.  [default: what they were saved in]",
)
def export(checkpoint: Path, directory: Path, dtype: str | None) -> None:
    """Write the weights of CHECKPOINT, or of the last one in it, into DIRECTORY, as other programs read them.

    That is model.safetensors and, for a model of the transformers library, what from_pretrained needs beside it.
    Needs neither the model nor memory for it.

    Exit code: 0 if they were written, 2 if not.

    Example: shardkit export checkpoints exported --dtype bf16
    """
    import torch

    from shardkit.checkpoints import export as write

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    with ended_by_sigterm(), _bytes(f"export {checkpoint.name}") as progress:
        write(checkpoint, directory, dtype=None if dtype is None else dtypes[dtype], progress=progress)
    click.echo(f"wrote {directory}")
    if not (directory / "config.json").exists():
        click.echo(
            "no config.json, which from_pretrained needs: the checkpoint isn't known to be of a transformers model",
            err=True,
        )


main.add_command(bench)
main.add_command(conformance)
main.add_command(max_batch)
main.add_command(new_backend)
main.add_command(parity)
main.add_command(plan)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the ranks too, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_console() -> Console:
    """Return the console on stdout."""
    from rich.console import Console

    # A pipe or a file has no width: rich's own guess of 80 columns would fold what needs no folding.
    return Console(width=None if sys.stdout.isatty() else 120)


@contextlib.contextmanager
def _bytes(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show on stderr, where that is a terminal, how many bytes of something are done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def steps_bar() -> Progress:
    """Return a bar on stderr that counts steps or runs, and shows only on a terminal; its console prints anywhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Listener]:
    """Show on stderr how far a comparison is: a bar on a terminal, a line for each trial elsewhere."""
    from shardkit.tools.compare import Listener, Row

    bar = steps_bar()
    console = bar.console

    class Printed(Listener):
        def begin(self, name: str) -> None:
            self._task = bar.add_task(name, total=steps)

        def progress(self, steps: int) -> None:
            bar.update(self._task, completed=steps)

        def end(self, row: Row) -> None:
            for task in bar.task_ids:
                bar.remove_task(task)
            took = f" in {row.seconds:.0f} s" if row.seconds else ""
            verdict = "done" if row.status == "reference" else row.status
            console.print(f"{row.strategy}: {verdict}{took}", markup=False, highlight=False, soft_wrap=True)

    with bar:
        yield Printed()


if __name__ == "__main__":
    main(prog_name="shardkit")
