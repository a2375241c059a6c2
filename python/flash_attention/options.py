"""A call as named tuples: its tensors and its options.

The binding has both lists (src/api/option_table.h and python/binding/call/call.h); a new option is a line there. Their
order is that of the binding and of the torch ops: `*tensors[:NUM_TENSORS], *options` are the first arguments of an op.
"""

from collections import namedtuple

from flash_attention import _core

Tensors = namedtuple("Tensors", _core.tensors, defaults=(None,) * (len(_core.tensors) - 3))
Options = namedtuple(
    "Options", [name for name, _, _ in _core.options], defaults=[default for _, _, default in _core.options]
)

NAMED = {name: default for name, _, default in _core.options if name in _core.named_options}  # passed on as they are

NUM_TENSORS = Tensors._fields.index("page_table")  # those of attention(); the rest belong to caches and 8 bits
NUM_OPTIONS = len(Options._fields)
_DETERMINISTIC = Options._fields.index("deterministic")


def has_statistics(options):
    return options.return_max_logit or options.return_key_mass or options.return_entropy


def made_deterministic(options):
    return Options(*options[:_DETERMINISTIC], True, *options[_DETERMINISTIC + 1 :])  # torch.compile has no _replace


def split(arguments):
    """(tensors, options, the rest) of a torch op's arguments."""
    end = NUM_TENSORS + NUM_OPTIONS
    return Tensors(*arguments[:NUM_TENSORS]), Options(*arguments[NUM_TENSORS:end]), arguments[end:]
