"""Hugging Face transformers: a causal language model trains on sequences that are cut across ranks, by one call."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from flash_attention.arguments.head_dim import _pad
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.parallel.attention import context_attention
from flash_attention.parallel.layout import check_layout, shift_labels, split
from flash_attention.parallel.peers import ParallelError, resolve_group

NAME = "context_parallel"
IGNORE = -100


@dataclass
class Context:
    """How the sequence of a model is cut, with the lengths and documents of the last batch."""

    group: object
    layout: str
    method: str
    factor: float  # of the loss's gradient
    cu_seqlens: list | None = None
    key_lengths: torch.Tensor | None = None

    def __deepcopy__(self, memo):
        return self  # a process group cannot be copied; copies of a model share it

    @property
    def world(self):
        return dist.get_world_size(self.group)

    @property
    def chunks(self):
        return 2 * self.world if self.layout == "zigzag" and self.world > 1 else self.world


def parallelize_transformers(model, mesh_or_group=None, *, layout="zigzag", method="auto", gradients="mean", **wrong):
    """Lets a causal language model of transformers train with context parallelism; returns the model.

        model = parallelize_transformers(AutoModelForCausalLM.from_config(config), group)
        model = DistributedDataParallel(model)
        loss = model(input_ids, labels=labels).loss        # the whole batch on every rank; the loss of the whole batch

    Every rank calls the model with the whole sequence and keeps its own rows: tokens, positions and shifted labels are
    split, after padding at the end if the group does not divide them. Only attention communicates: it exchanges keys.
    `logits` are those of this rank's rows. Padding on the right (attention_mask) and documents end to end (position_ids
    that begin again, batch 1) are supported.

    gradients: how the gradients of ranks are joined: "mean" (DistributedDataParallel, FSDP) or "sum".
    """
    if wrong:
        refuse_keywords(parallelize_transformers, wrong)
    from transformers import AttentionInterface

    check_layout(layout)
    if gradients not in ("mean", "sum"):
        raise ValueError(f"gradients: got {gradients!r}; allowed are 'mean' and 'sum'")
    group = resolve_group(mesh_or_group)
    context = Context(group, layout, method, dist.get_world_size(group) if gradients == "mean" else 1.0)
    AttentionInterface.register(NAME, attention_forward)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        module._context_parallel = context
    model.register_forward_pre_hook(_split_batch, with_kwargs=True)
    model.register_forward_hook(_join_loss)
    return model


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None, s_aux=None,
    is_causal=None, **kwargs,
):  # fmt: skip
    """transformers' attention function: [batch, heads, rows, head_dim] -> (out [batch, rows, heads, head_dim], None)."""
    if attention_mask is not None:
        raise ParallelError(f"attention_mask: got shape {list(attention_mask.shape)} in a layer; it cannot be cut by rank")
    context = module._context_parallel
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, -1 if causal else sliding_window - 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (_pad(tensor.transpose(1, 2)) for tensor in (query, key, value))
    options = {"cu_seqlens": context.cu_seqlens, "key_lengths": context.key_lengths}
    if context.cu_seqlens:
        q, k, v = (tensor[0] for tensor in (q, k, v))
    out = context_attention(
        q, k, v, context.group, causal=causal, window=window, scale=scale, softcap=softcap or 0.0, sink=s_aux,
        dropout_p=dropout, method=context.method, layout=context.layout, **options,
    )[..., : value.shape[-1]]  # fmt: skip
    return out[None] if context.cu_seqlens else out, None


def _split_batch(model, arguments, options):
    """Replaces the whole batch by the rows of this rank."""
    context = model._context_parallel
    if len(arguments) > 1:
        raise ParallelError("model: expected input_ids as the only argument without a name")
    options = dict(options)
    if arguments:
        options["input_ids"] = arguments[0]
    tokens = options.get("input_ids")
    if tokens is None:
        raise ParallelError("input_ids: got None; context parallelism splits input_ids, whole on every rank")
    batch, seq = tokens.shape
    positions, labels = options.get("position_ids"), options.get("labels")
    starts = _documents(positions, batch)
    lengths = _key_lengths(options.pop("attention_mask", None), seq)
    missing = -seq % context.chunks
    if missing and starts is None and lengths is None:
        lengths = torch.full((batch,), seq, dtype=torch.int32, device=tokens.device)
    if positions is None:
        positions = torch.arange(seq, device=tokens.device).expand(batch, seq)
    if labels is not None:
        labels = shift_labels(labels, cu_seqlens=starts)
        options.setdefault("num_items_in_batch", (labels != IGNORE).sum())
    context.cu_seqlens = None if starts is None else [*starts, *([seq + missing] if missing else [])]
    context.key_lengths = lengths

    def rows(tensor, value):
        tensor = torch.nn.functional.pad(tensor, (0, missing), value=value)
        return split(tensor, context.world, dist.get_rank(context.group), layout=context.layout)

    options |= {"input_ids": rows(tokens, 0), "position_ids": rows(positions, 0), "use_cache": False}
    if labels is not None:
        options["labels"] = options["shift_labels"] = rows(labels, IGNORE)
    return (), options


def _documents(positions, batch):
    """cu_seqlens if positions begin again in the middle of the sequence."""
    if positions is None or batch != 1 or positions.dim() != 2:
        return None
    begins = (positions[0].diff() != 1).nonzero().flatten() + 1
    return [0, *begins.tolist(), positions.shape[1]] if len(begins) else None


def _key_lengths(mask, seq):
    """int32 [batch] of a mask that hides padding at the end; None if it hides nothing."""
    if mask is None or bool(mask.all()):
        return None
    lengths = mask.to(torch.int32).sum(-1, dtype=torch.int32) if mask.dim() == 2 else None
    if lengths is None or not torch.equal(mask.bool(), torch.arange(seq, device=mask.device) < lengths[:, None]):
        raise ParallelError(
            f"attention_mask: got shape {list(mask.shape)}; it cannot be cut: allowed is [batch, seq], padded on the right"
        )
    return lengths


class _Total(torch.autograd.Function):
    """The sum of all ranks' losses; a rank differentiates its own share."""

    @staticmethod
    def forward(ctx, loss, context):
        ctx.factor = context.factor
        total = loss.clone()
        dist.all_reduce(total, group=context.group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def _join_loss(model, arguments, output):
    loss = getattr(output, "loss", None)
    if loss is not None:
        output.loss = _Total.apply(loss, model._context_parallel)
    return output
