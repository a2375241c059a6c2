"""Errors that begin with the argument's name, for functions whose callers know it by another."""


class Renamed:
    """`with Renamed({here: there}):` an error raised inside of it begins with the caller's names, "name, name: ..."."""

    def __init__(self, names):
        self.names = names

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if not isinstance(error, TypeError | ValueError | RuntimeError):
            return
        arguments, _, rest = str(error).partition(": ")
        there = ", ".join(self.names.get(argument, argument) for argument in arguments.split(", "))
        if rest and there != arguments:
            raise kind(f"{there}: {rest}") from error
