"""python -m flash_attention compile: kernels for a shape, compiled into the cache before they are needed."""

import flash_attention
from flash_attention.commands import _problem

help = "compile the kernels of one shape into the cache"


def add_arguments(parser):
    _problem.add_arguments(parser)


def run(arguments):
    q, k, v = _problem.tensors(arguments)
    options = {"causal": arguments.causal, "layout": "bhsd"}
    flash_attention.compile(q, k, v, backward=arguments.backward, **options)
    print(flash_attention.explain(q, k, v, **options))
    return 0
