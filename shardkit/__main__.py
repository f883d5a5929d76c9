"""``python -m shardkit``: the command line."""

from shardkit.cli import main

main(prog_name="shardkit")
