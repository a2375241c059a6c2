"""The verbs of `python -m flash_attention`.

Each module here without a leading underscore is one verb, with `help`, `add_arguments(parser)` and `run(arguments)`, which
returns the exit status.
"""
