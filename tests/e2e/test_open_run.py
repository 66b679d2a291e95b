"""What must hold before step 0."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

import rlk.train.run
from rlk.config import RunConfig
from rlk.errors import CheckFailed


def test_ranks_compare_their_contracts_before_anything_is_written(tiny, tmp_path, monkeypatch):
    def disagree(mine, everyone):
        assert everyone == [mine.as_dict()]
        raise CheckFailed("rank 0 runs under another contract")

    monkeypatch.setattr(rlk.train.run, "agree", disagree)
    config = RunConfig(model=str(tiny / "model"), prompts=str(tiny / "prompts.jsonl"), run_dir=str(tmp_path / "run"),
                       max_response_len=16)
    try:
        with pytest.raises(CheckFailed, match="another contract"), ExitStack() as stack:
            rlk.train.run.open_run(config, {}, stack)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not (tmp_path / "run").exists()
