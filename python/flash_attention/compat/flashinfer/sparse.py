"""FlashInfer's attention over blocks: a matrix of blocks in compressed rows, or blocks of different sizes by head."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention import attention
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.compat.flashinfer.arguments import finish, refuse_given, scale_of
from flash_attention.compat.flashinfer.masks import unpacked
from flash_attention.compat.flashinfer.narrow import head_scales, widened


def _check_positions(mode):
    if mode != "NONE":
        raise NotImplementedError(f"pos_encoding_mode: got {mode!r}; only 'NONE' is supported over blocks")


def _blocks_of_mask(mask, packed_mask, count, R, C):
    """Bool [count, R, C] of a mask or of its bits; if both are given, of the bits, as FlashInfer takes them."""
    if packed_mask is not None:
        return unpacked(packed_mask, count * R * C, "packed_mask").view(count, R, C)
    if tuple(mask.shape) != (count, R, C):
        raise ValueError(f"mask: got shape {list(mask.shape)}; expected {[count, R, C]}, a part for each block")
    return mask.bool()


def _replan(wrapper, q, pos_encoding_mode, logits_soft_cap, sm_scale):
    """Plans the same blocks with other options."""
    _check_positions(pos_encoding_mode)
    if wrapper._plan is not None:
        wrapper._plan |= {"softcap": logits_soft_cap or 0.0, "scale": scale_of(q.shape[-1], sm_scale)}


class BlockSparseAttentionWrapper:
    """FlashInfer's wrapper: plan() takes which blocks of R queries see which blocks of C keys, run() attends.

    Forward only, as in FlashInfer; attention(key_blocks=...) has gradients. plan() reads indptr on the host.
    """

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        self.device = float_workspace_buffer.device
        self._plan = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: no workspace of the caller is used."""

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16",
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
        kv_block_lens: Tensor | None = None,
        q2k_indices: Tensor | None = None,
        q2k_num: Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        **wrong: NoReturn,
    ) -> None:
        """indptr int32 [M / R + 1] and indices int32 [number of blocks]: row r of blocks of queries sees the blocks of keys
        indices[indptr[r] : indptr[r + 1]], the same for all heads. mask: bool [number of blocks, R, C], what is seen of
        each block, or packed_mask, its bits in bytes, the lowest first; they become a mask of M x N bytes.
        """
        if wrong:
            refuse_keywords(self.plan, wrong)
        refuse_given(block_mask=block_mask, kv_block_lens=kv_block_lens)
        refuse_given(q2k_indices=q2k_indices, q2k_num=q2k_num, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        _check_positions(pos_encoding_mode)
        for name, size, block in (("R", M, R), ("C", N, C)):
            if block < 1 or size % block != 0:
                raise ValueError(f"{name}: got {block}; expected a divisor of {size}")
        rows = M // R
        if indptr.dim() != 1 or indptr.shape[0] != rows + 1:
            raise ValueError(f"indptr: got shape {list(indptr.shape)}; expected [{rows + 1}], one more than M / R")
        starts = indptr.to("cpu", torch.int64)
        lengths = starts[1:] - starts[:-1]
        if rows and (int(lengths.min()) < 0 or int(starts[0]) != 0 or int(starts[-1]) > indices.shape[0]):
            raise ValueError("indptr: expected 0 first, then ends that do not go down, up to the number of indices")
        most = max(int(lengths.max()), 1) if rows else 1
        places = torch.arange(most).expand(rows, -1)
        picked = (starts[:-1, None] + places).clamp_(max=max(indices.shape[0] - 1, 0))
        named = indices.to(self.device, torch.int32)
        lists = torch.full((rows, most), -1, dtype=torch.int32, device=self.device)
        if indices.shape[0]:
            lists = torch.where((places < lengths[:, None]).to(self.device), named[picked.to(self.device)], lists)
        self._plan = {
            "key_blocks": lists.view(1, rows, 1, most).contiguous(),
            "key_block_size": (R, C),
            "causal": causal,
            "softcap": logits_soft_cap or 0.0,
            "scale": scale_of(head_dim, sm_scale, None, None),
        }
        if mask is not None or packed_mask is not None:
            seen = _blocks_of_mask(mask, packed_mask, int(starts[-1]), R, C).to(self.device)
            of_row = torch.repeat_interleave(torch.arange(rows), lengths).to(self.device)
            whole = torch.zeros(rows, N // C, R, C, dtype=torch.bool, device=self.device)
            blocks = named[: len(of_row)].long()
            inside = (blocks >= 0) & (blocks < N // C)
            whole[of_row[inside], blocks[inside]] = seen[inside]
            self._plan["mask"] = whole.transpose(1, 2).reshape(1, 1, M, N)
        self._shape = ((M, num_qo_heads, head_dim), (N, num_kv_heads, head_dim))

    begin_forward = plan

    @torch.no_grad()
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        **wrong: NoReturn,
    ) -> Any:
        """out [M, num_qo_heads, head_dim] for q [M, num_qo_heads, head_dim] and k, v [N, num_kv_heads, head_dim]; with
        return_lse also the logarithm of base 2, [M, num_qo_heads]. scale_q, scale_k, scale_v: of q, k and v in float8,
        float32 [heads] or [1]; such rows become float16 first.
        """
        if wrong:
            refuse_keywords(self.run, wrong)
        if self._plan is None:
            raise RuntimeError("run: expected a call of plan() before")
        for name, tensor, shape in (("q", q, self._shape[0]), ("k", k, self._shape[1])):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: got shape {list(tensor.shape)}; expected {list(shape)}, as planned")
        scales = head_scales(q, k, scale_q, scale_k, scale_v)
        q, k, v = (
            widened(rows, scale) if rows.element_size() == 1 else rows
            for rows, scale in zip((q, k, v), scales, strict=True)
        )
        found, sums = attention(q[None], k[None], v[None], **self._plan, return_lse=True)
        return finish(found[0], sums[0].transpose(0, 1), None, out, lse, return_lse)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """run() with other options, in FlashInfer's old order."""
        _replan(self, q, pos_encoding_mode, logits_soft_cap, sm_scale)
        return self.run(q, k, v, scale_q, scale_k, scale_v)

    def end_forward(self) -> None:
        """Does nothing: no resources are held."""


class VariableBlockSparseAttentionWrapper:
    """FlashInfer's wrapper for blocks of different sizes: each key head has its own rows and columns of blocks.

    Each query gets the list of keys that its row of blocks sees. Forward only.
    """

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        self.device = float_workspace_buffer.device
        self._plan = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: no workspace of the caller is used."""

    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        **wrong: NoReturn,
    ) -> None:
        """block_mask_map: bool [num_kv_heads, rows, columns]; block_row_sz, block_col_sz: queries and keys of each row and
        column, [num_kv_heads, rows] and [num_kv_heads, columns], of the same sum in all heads.
        """
        if wrong:
            refuse_keywords(self.plan, wrong)
        _check_positions(pos_encoding_mode)
        seen = block_mask_map.to("cpu", torch.bool)
        of_rows, of_columns = block_row_sz.to("cpu", torch.int64), block_col_sz.to("cpu", torch.int64)
        wanted = (num_kv_heads, *seen.shape[1:2]), (num_kv_heads, *seen.shape[2:3])
        for name, sizes, shape in (("block_row_sz", of_rows, wanted[0]), ("block_col_sz", of_columns, wanted[1])):
            if seen.dim() != 3 or seen.shape[0] != num_kv_heads or tuple(sizes.shape) != shape:
                raise ValueError(f"{name}: got shape {list(sizes.shape)}; expected {list(shape)}, as block_mask_map has")
            if len(set(sizes.sum(1).tolist())) > 1 or (sizes < 0).any():
                raise ValueError(f"{name}: expected sizes of 0 and more with the same sum in all heads")
        queries, keys = int(of_rows[0].sum()), int(of_columns[0].sum())
        most = max(int((seen.long() * of_columns[:, None]).sum(2).max()), 1)
        lists = torch.full((queries, num_kv_heads, most), -1, dtype=torch.int32)
        for head in range(num_kv_heads):
            column = torch.repeat_interleave(torch.arange(seen.shape[2]), of_columns[head])
            first = 0
            for row, size in enumerate(of_rows[head].tolist()):
                named = seen[head, row][column].nonzero()[:, 0].int()
                lists[first : first + size, head, : len(named)] = named
                first += size
        self._plan = {
            "key_indices": lists[None].to(self.device),
            "causal": causal,
            "softcap": logits_soft_cap or 0.0,
            "scale": scale_of(head_dim, sm_scale, None, None),
        }
        self._shape = ((num_qo_heads, queries, head_dim), (num_kv_heads, keys, head_dim))

    begin_forward = plan

    @torch.no_grad()
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        **wrong: NoReturn,
    ) -> Any:
        """out [num_qo_heads, queries, head_dim] for q, k, v with heads first; with return_lse also the logarithm of base 2,
        [num_qo_heads, queries].
        """
        if wrong:
            refuse_keywords(self.run, wrong)
        if self._plan is None:
            raise RuntimeError("run: expected a call of plan() before")
        for name, tensor, shape in (("q", q, self._shape[0]), ("k", k, self._shape[1])):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: got shape {list(tensor.shape)}; expected {list(shape)}, as planned")
        found, sums = attention(q[None], k[None], v[None], layout="bhsd", **self._plan, return_lse=True)
        return finish(found[0], sums[0], None, out, lse, return_lse)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """run() with other options, in FlashInfer's old order."""
        _replan(self, q, pos_encoding_mode, logits_soft_cap, sm_scale)
        return self.run(q, k, v)

    def end_forward(self) -> None:
        """Does nothing: no resources are held."""
