"""Whether torch.compile traces. Nothing here imports torch before its first use."""

import sys

state_of_torch = None  # of each thread, in which torch.compile keeps what it traces; set at the first use of torch


def is_tracing():
    """Whether torch.compile traces the caller."""
    if state_of_torch is None:
        if "torch" not in sys.modules:
            return False
        from flash_attention.pytorch import autograd

        autograd.connect()
    try:
        return state_of_torch.tracing_context is not None
    except AttributeError:  # no trace yet in this thread; torch leaves None behind one, and an attribute is found faster
        state_of_torch.tracing_context = None
        return False


# torch.compile calls it and keeps the answer, without a look at what it reads: that changes with the first use of the
# package, and a trace that is begun anew must find what the one before has found.
is_tracing._dynamo_marked_constant = True
