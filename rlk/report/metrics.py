"""One step's metrics: the line in metrics.jsonl and the line on the console."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field


@dataclass
class StepMetrics:
    """What one step did. Times are seconds of wall clock."""

    step: int
    policy_version: int
    reward: float  # mean over the step's samples
    response_tokens: int
    compared: int  # log-probs of distinct samples
    unequal: int
    rollout_s: float
    train_s: float
    step_s: float
    extra: dict[str, float] = field(default_factory=dict)  # loss, kl, grad_norm, entropy, reward_errors, ...

    def as_dict(self) -> dict:
        """Flat, for metrics.jsonl; JSON has no infinity and no NaN, so those become null."""
        row = asdict(self)
        row |= row.pop("extra")
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()}

    def console_line(self, last_step: int) -> str:
        """The one line per step; steps count from 0 to `last_step`."""
        width = len(str(last_step))
        return (f"step {self.step:>{width}}/{last_step}  reward {self.reward:.2f}  tokens {self.response_tokens}  "
                f"unequal {self.unequal}/{self.compared}  rollout {self.rollout_s:.2f}s  train {self.train_s:.2f}s  "
                f"step {self.step_s:.2f}s")
