"""python -m flash_attention VERB: every module of flash_attention.commands without a leading underscore is a verb."""

import argparse
import sys
from importlib import import_module
from pkgutil import iter_modules

from flash_attention import __version__, commands


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m flash_attention", description="Exact attention on CPUs and NVIDIA GPUs."
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in iter_modules(commands.__path__):
        if module.name.startswith("_"):
            continue
        command = import_module(f"{commands.__name__}.{module.name}")
        verb = verbs.add_parser(module.name, help=command.help, description=command.__doc__)
        command.add_arguments(verb)
        verb.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ModuleNotFoundError, RuntimeError, ValueError) as error:
        advice = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        print(f"{arguments.verb}: {error}{advice}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
