"""The verbs of `python -m flash_attention`.

Each module here without a leading underscore is one, with `help`, `add_arguments(parser)` and `run(arguments)`, which
gives the exit status.
"""
