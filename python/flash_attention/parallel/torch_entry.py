"""torch's own entry, torch.distributed.tensor.experimental.context_parallel, on this library's ring.

torch cuts the buffers and calls scaled_dot_product_attention with DTensors that are sharded along the sequence. The
operator that it then chooses is handled here: on a GPU flash, and on a CPU, for which torch has no handler.
"""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from flash_attention.parallel import arguments, ring
from flash_attention.parallel.agreement import Agreement
from flash_attention.parallel.call import Call
from flash_attention.parallel.peers import ParallelError, Peers

_aten = torch.ops.aten
_SEQ = 2  # [batch, heads, seq, head_dim]
_replaced = {}


def register_context_parallel() -> None:
    """Lets torch's context_parallel() use this library if torch chooses its flash kernels.

        flash_attention.parallel.register_context_parallel()
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    Both of torch's layouts are supported (its load balancer is "zigzag"). torch's other kernels are not replaced:
    torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) chooses flash.
    """
    table = _table()
    for op, handler in _HANDLERS.items():
        if table.get(op) is not handler:
            _replaced[op] = table.get(op)
            table[op] = handler


def unregister_context_parallel() -> None:
    """Restores torch's own context_parallel().

    For example:

        register_context_parallel()
        unregister_context_parallel()
    """
    table = _table()
    for op, handler in _replaced.items():
        if handler is None:
            table.pop(op, None)
        else:
            table[op] = handler
    _replaced.clear()


def _torchs():
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError:
        raise ParallelError(
            f"torch {torch.__version__}: its context_parallel() has no table of operators that this library knows; "
            "use flash_attention.parallel.context_attention()"
        ) from None
    return _attention


def _table():
    return _torchs().custom_ops


def _call(q, k, v, tensor, causal, scale, dropout_p):
    if dropout_p:
        raise ParallelError(f"dropout_p: got {dropout_p}; allowed here: 0; context_attention() has dropout")
    peers = Peers(tensor.device_mesh.get_group())
    layout = "zigzag" if _torchs()._cp_options.enable_load_balance else "contiguous"
    window = arguments.bounds(causal, (-1, -1))
    none = {
        "bias": None,
        "mask": None,
        "documents": (),
        "dropout_p": 0.0,
        "alibi_slopes": None,
        "key_lengths": None,
        "sink": None,
    }
    fault = arguments.fault(q, k, v, world=peers.world, method="ring", layout=layout, window=window, **none)
    agreement = Agreement(peers, arguments.fields(q, k, v, window=window, layout=layout, scale=scale), fault, q.device)
    if fault:
        agreement.wait()
    shape = arguments.shape_of(q, peers.world, layout, window, (), False)
    return Call(peers, shape, agreement, scale, deterministic=torch.are_deterministic_algorithms_enabled())


def _rows_first(*tensors):
    """Local tensors of DTensors, [batch, rows, heads, head_dim]."""
    return [tensor._local_tensor.transpose(1, 2) for tensor in tensors]


def _sharded(local, like):
    return DTensor.from_local(local.detach(), like.device_mesh, like.placements, run_check=False)


def _is_cut(tensor):
    return isinstance(tensor, DTensor) and tuple(tensor.placements) == (Shard(_SEQ),)


def _forward(query, key, value, dropout_p, causal, scale):
    q, k, v = _rows_first(query, key, value)
    call = _call(q, k, v, query, causal, scale, dropout_p)
    with torch.no_grad():
        out, lse = ring.forward(call, q, k, v, None, None)
    return _sharded(out.transpose(1, 2), query), _sharded(lse, query)


def _backward(dout, query, key, value, out, lse, dropout_p, causal, scale):
    q, k, v, o, do = _rows_first(query, key, value, out, dout)
    call = _call(q, k, v, query, causal, scale, dropout_p)
    with torch.no_grad():
        found = ring.backward(call, q, k, v, None, None, o, lse._local_tensor, do, None, (False, False))
    return tuple(_sharded(gradient.transpose(1, 2), query) for gradient in found[:3])


def _kept(op, args, kwargs):
    """Calls torch's own handler of an operator."""
    handler = _replaced.get(op)
    if handler is None:
        raise ParallelError(f"{op}: got placements {args[0].placements}; allowed here: Shard({_SEQ}), the sequence")
    return handler(op, args, kwargs)


def _cpu_forward(op, args, kwargs):
    query, key, value, *rest = args
    dropout_p, causal = (*rest, *(0.0, False)[len(rest) :])
    if not _is_cut(query):
        return _kept(op, args, kwargs)
    if kwargs.get("attn_mask") is not None:
        raise ParallelError("attn_mask: got a mask; it cannot be cut here: context_attention() takes masks")
    return _forward(query, key, value, dropout_p, causal, kwargs.get("scale"))


def _cpu_backward(op, args, kwargs):
    dout, query, key, value, out, lse, dropout_p, causal = args
    if not _is_cut(query):
        return _kept(op, args, kwargs)
    return _backward(dout, query, key, value, out, lse, dropout_p, causal, kwargs.get("scale"))


def _gpu_forward(op, args, kwargs):
    query, key, value, *rest = args
    if not _is_cut(query):
        return _kept(op, args, kwargs)
    dropout_p, causal, _ = (*rest, *(0.0, False, False)[len(rest) :])
    out, lse = _forward(query, key, value, dropout_p, causal, kwargs.get("scale"))
    state, unused, debug = (
        DTensor.from_local(empty, query.device_mesh, [Replicate()], run_check=False)
        for empty in (
            query._local_tensor.new_zeros(2, dtype=torch.int64),
            query._local_tensor.new_empty(0, dtype=torch.int64),
            query._local_tensor.new_empty(0),
        )
    )
    return out, lse, None, None, query.shape[_SEQ], key.shape[_SEQ], state, unused, debug


def _gpu_backward(op, args, kwargs):
    dout, query, key, value, out, lse, _, _, _, _, dropout_p, causal, _, _ = args
    if not _is_cut(query):
        return _kept(op, args, kwargs)
    return _backward(dout, query, key, value, out, lse, dropout_p, causal, kwargs.get("scale"))


_HANDLERS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_backward,
    _aten._scaled_dot_product_flash_attention.default: _gpu_forward,
    _aten._scaled_dot_product_flash_attention_backward.default: _gpu_backward,
}
