"""Runs the model over one batch of the scheduler: index tensors from numpy, attention over the pages.

Shape legend: T tokens of the batch, N its sequences, B sequences that sample, D hidden, V padded vocabulary, H query
heads (local), G kv heads (local), E head dim, L layers, P pages, S page size.
"""

from __future__ import annotations

import numpy as np
import torch

from rlk.model.qwen3 import Qwen3
from rlk.ops.attention import attention_paged, write_kv
from rlk.rollout.paged.kv_cache import PageTable, allocate_pages
from rlk.rollout.paged.scheduler import Batch


class PagedContext:
    """How the model attends in a forward pass of the engine (the ForwardContext of rollout)."""

    def __init__(self, positions_T: torch.Tensor, slots_T: torch.Tensor, segments: torch.Tensor,
                 block_table: torch.Tensor, k_LPSGE: torch.Tensor, v_LPSGE: torch.Tensor) -> None:
        self.positions_T = positions_T
        self._slots_T, self._segments, self._block_table = slots_T, segments, block_table
        self._k_LPSGE, self._v_LPSGE = k_LPSGE, v_LPSGE

    def attend(self, layer: int, q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
        k_PSGE, v_PSGE = self._k_LPSGE[layer], self._v_LPSGE[layer]
        write_kv(k_TGE, v_TGE, k_PSGE, v_PSGE, self._slots_T)
        return attention_paged(q_THE, k_PSGE, v_PSGE, self._segments, self._block_table)


class Runner:
    """The model, the pages' tensors, and the step from a batch to hidden states."""

    def __init__(self, model: Qwen3, pages: PageTable) -> None:
        config = model.config
        self.model = model
        self.pages = pages
        self._k_LPSGE, self._v_LPSGE = allocate_pages(
            config.num_layers, len(pages.pool.holders), pages.page_size, model.num_kv_heads, config.head_dim,
            model.dtype, model.device)
        self._block_table = torch.from_numpy(pages.block_table)  # the same memory: the scheduler writes, kernels read

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Final hidden states [T, D] of the batch's tokens; their keys and values are in the pages afterwards."""
        page_size = self.pages.page_size
        counts_N, starts_N, lanes_N = np.array([(n, s.computed, s.lane) for s, n in batch], np.int64).T
        rows_N = np.cumsum(counts_N) - counts_N
        positions_T = np.arange(counts_N.sum()) + np.repeat(starts_N - rows_N, counts_N)
        pages_T = self.pages.block_table[np.repeat(lanes_N, counts_N), positions_T // page_size].astype(np.int64)
        slots_T = pages_T * page_size + positions_T % page_size
        tokens_T = np.concatenate([s.tokens[s.computed:s.computed + n] for s, n in batch]).astype(np.int64)
        segments = np.stack([rows_N, counts_N, starts_N, lanes_N], axis=1).astype(np.int32)

        device = self.model.device
        context = PagedContext(
            torch.from_numpy(positions_T).to(device), torch.from_numpy(slots_T).to(device),
            torch.from_numpy(segments), self._block_table.to(device), self._k_LPSGE, self._v_LPSGE)
        return self.model.hidden(torch.from_numpy(tokens_T).to(device), context)

    def logits(self, hidden_TD: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """FP32 logits [B, V] of the given rows, the padded vocabulary of all tensor-parallel ranks."""
        if len(rows) < len(hidden_TD):
            hidden_TD = hidden_TD[rows]
        return self.model.logits(hidden_TD)
