"""torch.compiler.disable, whose import of torch._dynamo takes seconds, where something compiles; nothing elsewhere."""

import functools
import sys

import torch


def untraced(function):
    """torch.compile does not follow the function, nor what it calls."""

    @functools.cache
    def disabled():
        return torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        run = disabled() if "torch._dynamo" in sys.modules else function  # whatever compiles has imported it
        return run(*args, **kwargs)

    call._torchdynamo_disable = True  # a trace ends here, as before a function of torch.compiler.disable
    call._torchdynamo_disable_msg = None
    return call
