"""The command `weft`: `main` reads its options; each command is a file or folder beside it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

import weft


def parser() -> ArgumentParser:
    """The options of all commands."""
    from . import doctor
    from .bench import command as bench
    from .demo import command as demo

    made = ArgumentParser("weft", description="Sparse and partitioned collectives for PyTorch.")
    made.add_argument("--version", action="version", version=f"weft-collectives {weft.__version__}")
    commands = made.add_subparsers(metavar="COMMAND", required=True)
    for module, run in ((demo, demo.demo), (bench, bench.bench), (doctor, doctor.doctor)):
        text = run.__doc__ or ""
        one = commands.add_parser(run.__name__, help=text.splitlines()[0], description=text)
        one.set_defaults(run=run)
        module.add_options(one)
    return made


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; what cannot be done is one line, and exit status 2."""
    given = parser().parse_args(arguments)
    try:
        status = given.run(given)
    except KeyboardInterrupt:
        status = 130
    except (weft.Error, OSError) as error:
        print(f"weft {given.run.__name__}: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)
