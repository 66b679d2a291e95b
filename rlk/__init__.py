"""RLK: GRPO post-training whose recomputed log-probs have the same bits as the sampled ones."""

__version__ = "0.1.0"
