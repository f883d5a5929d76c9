"""``shardkit parity``: record, compare, run, upgrade, bisect."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardkit import _cli_options as options

if TYPE_CHECKING:
    from shardkit.parity._measure import Listener
    from shardkit.parity._work import Work

_WORKLOAD = click.argument("workload", default="t5-tiny", metavar="[NAME|FILE.py[:FUNCTION][:KEY=VALUE,...]]")
_OUTPUT = click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write report.json, report.xml (JUnit) and report.html, with plots, into this directory.",
)


def _work(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of what is run."""
    options = [
        click.option("--steps", default=6, show_default=True, type=click.IntRange(1), help="Optimizer steps."),
        click.option(
            "--processes", default=2, show_default=True, type=click.IntRange(1), help="Ranks that train together."
        ),
        click.option(
            "--batch-size",
            default=2,
            show_default=True,
            type=click.IntRange(1),
            help="Samples in a micro-batch of one rank.",
        ),
        click.option(
            "--accumulate", default=3, show_default=True, type=click.IntRange(1), help="Micro-batches per step."
        ),
        click.option("--max-grad-norm", type=float, help="Clip the global L2 norm of the gradient.  [default: not]"),
        click.option("--seed", type=int, help="Seed of the random generators, plus the rank."),
        click.option(
            "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]), help="Where."
        ),
        click.option(
            "--timeout",
            default=120.0,
            show_default=True,
            type=click.FloatRange(5),
            help="Seconds that one run may take before it is given up.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _strategies(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--strategies",
        multiple=True,
        metavar="A,B",
        help="Strategies, separated by commas; what reads name=value belongs to the strategy before it. May be "
        "repeated.  [default: every variant of the backends concerned]",
    )(function)


def _repeats(default: int) -> Callable[..., Any]:
    return click.option(
        "--repeats",
        default=default,
        show_default=True,
        type=click.IntRange(1),
        help="How often each runs, in fresh processes: a race shows as a run that differs from itself.",
    )


def _controls(default: bool) -> Callable[..., Any]:
    return click.option(
        "--controls/--no-controls",
        default=default,
        show_default=True,
        help="Run each strategy's library by itself as well, with its own defaults.",
    )


def _probe(default: bool) -> Callable[..., Any]:
    return click.option(
        "--probe/--no-probe",
        default=default,
        show_default=True,
        help="Have each also train a small perceptron for many quick steps, twice: races show there first.",
    )


@click.group
def parity() -> None:
    """Record what runs are like, compare them, and find what an upgrade changes and since which version.

    WORKLOAD is a built-in one (docs/workloads.md) or a function of your own file: one that needs no arguments
    makes a workload; one with two, a strategy and record, is your own training loop (docs/parity.md).
    """


@parity.command
@_WORKLOAD
@click.option("--strategy", required=True, help="What to train with, in the words of docs/strategies.md.")
@click.option(
    "-o", "--output", "path", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The trace's file."
)
@click.option(
    "--detail",
    default="sketch",
    show_default=True,
    type=click.Choice(["losses", "sketch", "whole"]),
    help="What is kept of each parameter: nothing, sketches of weight and gradient, or the whole gradients too.",
)
@click.option("--control", is_flag=True, help="Drive the strategy's library by itself, with its own defaults.")
@_work
def record(workload: str, strategy: str, path: Path, detail: str, control: bool, timeout: float, **sizes: Any) -> None:
    """Train WORKLOAD under a strategy in fresh processes, and write a trace of it.

    Exit code: 0 if it was written, 2 if it could not run.

    Example: shardkit parity record t5-tiny --strategy deepspeed:stage=2 -o stage2.trace
    """
    from shardkit.errors import LaunchError, TraceError
    from shardkit.parity._measure import Arm, arms_of, preload_of
    from shardkit.parity._results import Failure
    from shardkit.parity._runner import Runner
    from shardkit.parity._work import resolved

    work, is_loop = resolved(_sized(workload, sizes))
    arms_of([strategy], [], controls=False, is_loop=is_loop)
    if not path.parent.is_dir():
        raise TraceError(f"the trace can't be written: there is no directory {str(path.parent)!r}")
    if not os.access(path.parent, os.W_OK):
        raise TraceError(f"the trace can't be written: the directory {str(path.parent)!r} is read-only")
    with _ended_by_sigterm(), Runner({}, preload=preload_of([Arm(strategy)])) as runner, _progress() as listener:
        listener.begin(strategy, None if is_loop else work.steps)
        found = runner.run(
            work,
            "arm",
            timeout=timeout,
            strategy=strategy,
            control=control,
            detail=detail,
            progress=listener.progress,
        )
    if isinstance(found, Failure):
        raise LaunchError("\n".join(filter(None, [found.headline, found.details])))
    found.trace.save(path)
    loss = found.trace.loss
    click.echo(f"wrote {path}: {found.trace.steps} steps of {strategy}, loss {loss[0]:.6g} -> {loss[-1]:.6g}")


@parity.command
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--again",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Another run of A's: by what it differs from A, B may differ too.",
)
@options.json
@_OUTPUT
@click.pass_context
def compare(ctx: click.Context, /, a: Path, b: Path, again: Path | None, as_json: bool, output: Path | None) -> None:
    """Say where the trace B parts from the trace A first, in which quantity and parameter, how the gap grows, and why.

    Exit code: 0 if they are the same but for round-off, 1 if they differ, 2 if they can't be compared.

    Example: shardkit parity compare before.trace after.trace --output report
    """
    from shardkit.parity._compare import compare
    from shardkit.parity._trace import Trace
    from shardkit.parity.outputs import write

    write.check(output)
    traces = [Trace.load(path) for path in (a, b)]
    other = None if again is None else Trace.load(again)
    found = dataclasses.replace(compare(*traces, again=other), a=str(a), b=str(b))
    write.emit(found, _console(), as_json=as_json, output=output)
    ctx.exit(found.exit_code)


@parity.command
@_WORKLOAD
@_strategies
@_controls(False)
@_repeats(2)
@_probe(False)
@_work
@options.json
@_OUTPUT
@click.pass_context
def run(
    ctx: click.Context,
    /,
    workload: str,
    strategies: tuple[str, ...],
    controls: bool,
    repeats: int,
    probe: bool,
    timeout: float,
    as_json: bool,
    output: Path | None,
    **sizes: Any,
) -> None:
    """Train WORKLOAD under all strategies, and hold each against float64 and plain DDP.

    A strategy is at parity if it is no further from a float64 reference than a stated factor of what torch's own DDP is
    on the same work. Each runs several times: one that differs from itself is a race.

    Exit code: 0 if all are at parity, 1 if one isn't, 2 if one could not run.

    Example: shardkit parity run gpt2-tiny --strategies ddp,deepspeed:stage=3 --output report
    """
    from shardkit.parity import _suite
    from shardkit.parity.outputs import write
    from shardkit.tools.compare import split_strategies

    write.check(output)
    with _ended_by_sigterm(), _progress() as listener:
        found = _suite.run(
            _sized(workload, sizes),
            split_strategies(strategies),
            controls=controls,
            repeats=repeats,
            probe=probe,
            timeout=timeout,
            listener=listener,
        )
    write.emit(found, _console(), as_json=as_json, output=output)
    ctx.exit(found.exit_code)


@parity.command
@click.argument("before", metavar="NAME==VERSION[,...]")
@click.argument("after", metavar="NAME==VERSION[,...]")
@click.option("--workload", default="t5-tiny", show_default=True, metavar="NAME|FILE.py[:FUNCTION][:KEY=VALUE,...]")
@_strategies
@_controls(True)
@_repeats(2)
@_probe(True)
@_work
@options.json
@_OUTPUT
@click.pass_context
def upgrade(
    ctx: click.Context,
    /,
    before: str,
    after: str,
    workload: str,
    strategies: tuple[str, ...],
    controls: bool,
    repeats: int,
    probe: bool,
    timeout: float,
    as_json: bool,
    output: Path | None,
    **sizes: Any,
) -> None:
    """Train under two versions of a library, and say whether numbers, defaults, speed or memory changed.

    Several packages are separated by commas; the version "installed" is the one that is there. Environments differ
    in these packages alone, share all others with this one, and are kept in a cache.

    Exit code: 0 if nothing differs, 1 if something does, 2 if something could not run.

    Example: shardkit parity upgrade deepspeed==0.19.2 deepspeed==installed --output report
    """
    from shardkit.parity import _upgrade
    from shardkit.parity.outputs import write
    from shardkit.tools.compare import split_strategies

    write.check(output)
    with _ended_by_sigterm(), _progress() as listener:
        found = _upgrade.upgrade(
            before,
            after,
            _sized(workload, sizes),
            split_strategies(strategies),
            controls=controls,
            repeats=repeats,
            probe=probe,
            timeout=timeout,
            listener=listener,
        )
    write.emit(found, _console(), as_json=as_json, output=output)
    ctx.exit(found.exit_code)


@parity.command
@click.argument("package")
@click.option("--good", required=True, metavar="VERSION", help="A version that is right.")
@click.option("--bad", required=True, metavar="VERSION", help="One that differs; newer, or older.")
@click.option("--workload", default="t5-tiny", show_default=True, metavar="NAME|FILE.py[:FUNCTION][:KEY=VALUE,...]")
@_strategies
@_controls(True)
@_repeats(2)
@_probe(True)
@_work
@options.json
@click.pass_context
def bisect(
    ctx: click.Context,
    /,
    package: str,
    good: str,
    bad: str,
    workload: str,
    strategies: tuple[str, ...],
    controls: bool,
    repeats: int,
    probe: bool,
    timeout: float,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Find the first version of PACKAGE between --good and --bad that differs from the good one.

    Versions that don't install or don't run are skipped. It is taken that a difference, once there, stays.

    Exit code: 0 if the version is found, 1 if good and bad don't differ, 2 if one of them could not run.

    Example: shardkit parity bisect deepspeed --good 0.19.0 --bad 0.19.8 --strategies deepspeed:stage=2
    """
    from shardkit.parity import _bisect
    from shardkit.parity.outputs import write
    from shardkit.tools.compare import split_strategies

    with _ended_by_sigterm(), _progress() as listener:
        found = _bisect.bisect(
            package,
            good,
            bad,
            _sized(workload, sizes),
            split_strategies(strategies),
            controls=controls,
            repeats=repeats,
            probe=probe,
            timeout=timeout,
            listener=listener,
        )
    write.emit(found, _console(), as_json=as_json, output=None)
    ctx.exit(found.exit_code)


def _sized(target: str, sizes: dict[str, Any]) -> Work:
    from shardkit.errors import InputError
    from shardkit.parity._work import OF_A_LOOP, Work, function_of

    told = click.get_current_context().get_parameter_source
    given = [name for name in sizes if name not in OF_A_LOOP and told(name) is click.core.ParameterSource.COMMANDLINE]
    if given and function_of(target)[1]:
        raise InputError(
            f"{target!r} is a loop, which has its own sizes: --{given[0].replace('_', '-')} is for workloads"
        )
    return Work(target, **sizes)


def _console() -> Any:
    from shardkit.cli import make_console

    return make_console()


def _ended_by_sigterm() -> contextlib.AbstractContextManager[None]:
    from shardkit.cli import ended_by_sigterm

    return ended_by_sigterm()


@contextlib.contextmanager
def _progress() -> Iterator[Listener]:
    """Show on stderr how far things are: bars on a terminal, a line for each run elsewhere."""
    from shardkit.cli import steps_bar
    from shardkit.parity._measure import Listener

    bar = steps_bar()
    console = bar.console

    class Printed(Listener):
        def __init__(self) -> None:
            self._all: Any = None
            self._run: Any = None

        def plan(self, runs: int) -> None:
            if self._all is None:
                self._all = bar.add_task("runs", total=runs)
            else:
                bar.update(self._all, total=(bar.tasks[0].total or 0) + runs)

        def note(self, text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        def begin(self, name: str, steps: int | None) -> None:
            self._run = bar.add_task(name, total=steps)

        def progress(self, steps: int) -> None:
            bar.update(self._run, completed=steps)

        def end(self, name: str, outcome: str) -> None:
            bar.remove_task(self._run)
            if self._all is not None:
                bar.advance(self._all)
            if outcome or not console.is_terminal:
                self.note(f"{name}: {outcome or 'done'}")

    with bar:
        yield Printed()
