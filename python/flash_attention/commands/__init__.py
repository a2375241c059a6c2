"""The verbs of `python -m flash_attention`: one module each, with `help`, `add_arguments(parser)` and `run(arguments) -> int`."""
