"""The autograd functions of FlashAttention-2 by name: FlashAttnFunc.apply(...) and so on, with their positional order.

Each calls the function of the same name. `return_softmax` and `is_grad_enabled` are the last arguments, as there.
"""

import torch

from flash_attention.compat.flash_attn import flash_attn_interface as interface


def _class(name, function, count):
    """A class whose apply() takes `count` arguments, the last of which, is_grad_enabled, may be left out."""

    def apply(*arguments):
        if len(arguments) not in (count - 1, count):
            raise TypeError(f"{name}.apply: got {len(arguments)} arguments; expected {count}")
        wants = torch.is_grad_enabled() and (len(arguments) < count or bool(arguments[-1]))
        with torch.set_grad_enabled(wants):
            return function(*arguments[: count - 1])

    return type(name, (), {"__doc__": f"apply(...) is {function.__name__}(...).", "apply": staticmethod(apply)})


FlashAttnFunc = _class("FlashAttnFunc", interface.flash_attn_func, 12)
FlashAttnQKVPackedFunc = _class("FlashAttnQKVPackedFunc", interface.flash_attn_qkvpacked_func, 10)
FlashAttnKVPackedFunc = _class("FlashAttnKVPackedFunc", interface.flash_attn_kvpacked_func, 11)
FlashAttnVarlenFunc = _class("FlashAttnVarlenFunc", interface.flash_attn_varlen_func, 17)
FlashAttnVarlenQKVPackedFunc = _class("FlashAttnVarlenQKVPackedFunc", interface.flash_attn_varlen_qkvpacked_func, 12)
FlashAttnVarlenKVPackedFunc = _class("FlashAttnVarlenKVPackedFunc", interface.flash_attn_varlen_kvpacked_func, 15)
