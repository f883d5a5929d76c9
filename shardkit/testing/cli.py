"""``shardkit conformance``."""

from __future__ import annotations

from pathlib import Path

import click

from shardkit import _cli_options as options


@click.command
@click.argument("name", metavar="NAME")
@options.strategies
@click.option(
    "--leave-out",
    multiple=True,
    metavar="PATTERN=REASON",
    help="Don't run the cases of this name or pattern, after a strategy and a space for one variant only; may be "
    "repeated. They are shown with the reason.",
)
@options.json
@click.option("--badge", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a .svg or .json.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the JSON into this file."
)
@click.pass_context
def conformance(
    ctx: click.Context,
    /,
    name: str,
    strategies: tuple[str, ...],
    leave_out: tuple[str, ...],
    as_json: bool,
    badge: Path | None,
    output: Path | None,
) -> None:
    """Run the suite for backend NAME: right, or refused, under each variant that it declares.

    It is that of shardkit.testing.BackendSuite (docs/conformance.md); pip install "shardkit[testing]" brings pytest.

    Exit code: 0 if nothing failed, 1 if something did, 2 if the command was refused.

    Example: shardkit conformance mine --badge conformance.svg
    """
    import importlib.util
    import json

    from shardkit.cli import make_console, steps_bar
    from shardkit.errors import InputError, MissingLibraryError
    from shardkit.tools.compare import split_strategies

    if importlib.util.find_spec("pytest") is None:
        raise MissingLibraryError('the suite needs pytest: pip install "shardkit[testing]"')
    from shardkit.testing._badge import check_badge, write_badge
    from shardkit.testing._conformance import conformance as run

    check_badge(badge)
    if output is not None and not output.parent.is_dir():
        raise InputError(f"{output.parent} is no directory to write {output.name} into")
    left_out = {}
    for pair in leave_out:
        pattern, separator, reason = pair.partition("=") if pair.count("=") == 1 else pair.rpartition("=")
        if not separator or not pattern.strip() or not reason.strip():
            raise InputError(f"--leave-out is PATTERN=REASON, not {pair!r}")
        left_out[pattern.strip()] = reason.strip()
    with steps_bar() as bar:
        task = bar.add_task(name, total=None)

        def watch(done: int, of: int, test: str) -> None:
            bar.update(task, completed=done, total=of, description=f"{name}: {test[:60]}")

        found = run(name, left_out=left_out, strategies=split_strategies(strategies), watch=watch)
    text = json.dumps(found.as_dict(), indent=2, ensure_ascii=False)
    if output is not None:
        output.write_text(text + "\n")
        click.echo(f"wrote {output}", err=True)
    if badge is not None:
        write_badge(found, badge)
        click.echo(f"wrote {badge}", err=True)
    if as_json:
        click.echo(text)
    else:
        from shardkit.testing._report import show

        show(found, make_console())
    ctx.exit(0 if found.passed else 1)
