"""``shardkit new-backend``."""

from __future__ import annotations

from pathlib import Path

import click

from shardkit import _cli_options as options


@click.command("new-backend")
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where to write it; must not exist yet, or be empty.  [default: ./shardkit-NAME]",
)
@options.json
def new_backend(name: str, directory: Path | None, as_json: bool) -> None:
    """Write a whole package for a backend NAME of your own, to begin from (docs/writing-a-backend.md).

    It has a plugin, an engine that trains right as it is, a footprint for shardkit plan, tests that hold it to the
    contract, and a workflow that runs them.

    Exit code: 0 if it was written, 2 if not; nothing is written then.

    Example: shardkit new-backend my-backend
    """
    import shlex

    from shardkit.scaffold._write import new_backend as write

    found = write(name, directory)
    commands = [f"cd {shlex.quote(str(found.directory))}", 'pip install -e ".[test]"', "pytest"]
    if as_json:
        from shardkit.tools.report import to_json

        click.echo(to_json({**found._asdict(), "directory": str(found.directory), "next": commands}))
        return
    click.echo(f"wrote {found.distribution} into {found.directory}:")
    for path in found.files:
        click.echo(f"  {path}")
    click.echo(f"try it: {' && '.join(commands)}")
    click.echo("its license is yours to choose: see README.md")
