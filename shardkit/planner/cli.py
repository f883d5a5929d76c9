"""``shardkit plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardkit import _cli_options as options


@click.command
@click.argument("workload", metavar="NAME|FILE.py[:FUNCTION]")
@click.option("--memory", metavar="SIZE", help="Of one rank, such as 24GiB.  [default: no limit, no largest batch]")
@options.processes
@options.strategies
@click.option(
    "--precisions", default="fp32,bf16,fp16", show_default=True, metavar="A,B", help="Each strategy in each of them."
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Micro-batch of a rank whose peak is shown.  [default: the largest that fits, or 1]",
)
@options.accumulate
@click.option(
    "--device",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where it would be trained; cuda needn't be here. auto: cuda where it is.",
)
@options.json
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write plan.json and plan.png into this directory.",
)
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    workload: str,
    memory: str | None,
    strategies: tuple[str, ...],
    precisions: str,
    as_json: bool,
    output: Path | None,
    **settings: Any,
) -> None:
    """Predict what each strategy would hold in memory, and the largest batch that fits.

    Nothing is allocated and no device is needed: the model's passes run on tensors that have shapes only.

    Exit code: 0 if a strategy fits, 1 if none does, 2 if the question was wrong.

    Example: shardkit plan t5-large --memory 24GiB --processes 2
    """
    from shardkit.cli import ended_by_sigterm, make_console
    from shardkit.planner import outputs
    from shardkit.planner._make import plan as make
    from shardkit.tools import report
    from shardkit.tools.compare import split_strategies

    report.check(output)
    kinds = [kind.strip() for kind in precisions.split(",") if kind.strip()]
    with ended_by_sigterm():
        found = make(workload, memory=memory, strategies=split_strategies(strategies), precisions=kinds, **settings)
    if output is not None:
        for path in outputs.write(found, output):
            click.echo(f"wrote {path}", err=True)
    if as_json:
        click.echo(outputs.as_json(found))
    else:
        console = make_console()
        console.print(outputs.table(found))
        for line in outputs.notes(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    ctx.exit(found.exit_code)
