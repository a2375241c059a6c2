"""FlashInfer's jit_args: kernels that a caller describes. Only the variant with attention sinks is supported, by name."""

_TENSORS, _SCALARS, _NAME = 7, 9, 11  # places of jit_args: names of more tensors, names of more numbers, the variant

SINK_VARIANT = (*[None] * _TENSORS, ("sink",), ("float",), ("sm_scale",), ("double",), "AttentionSink")  # as jit_args


def takes_sinks(jit_args):
    """Whether run() gets (sink, sm_scale) after its tensors. Refuses every other variant."""
    if jit_args is None:
        return False
    given = list(jit_args)
    name = given[_NAME] if len(given) > _NAME else None
    if name != "AttentionSink" or list(given[_TENSORS]) != ["sink"] or list(given[_SCALARS]) != ["sm_scale"]:
        raise NotImplementedError(
            f"jit_args: got the variant {name!r}, which is CUDA source; allowed are None and 'AttentionSink' with the "
            "tensor 'sink' and the number 'sm_scale'"
        )
    return True


def sinks_and_scale(takes, more, sinks, sm_scale):
    """(sinks, sm_scale) of a run: from the positional arguments of the variant, otherwise as given and planned."""
    if not takes:
        if more:
            raise NotImplementedError(f"run: got {len(more)} more positional arguments, which are those of jit_args")
        return sinks, sm_scale
    if len(more) != 2:
        raise TypeError(f"run: got {len(more)} more positional arguments; expected 2, sink and sm_scale of jit_args")
    return more
