"""The verbs of `python -m flash_attention`.

Each module here is one, with `help`, `add_arguments(parser)` and `run(arguments) -> exit status`.
"""
