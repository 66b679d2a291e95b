"""Reward functions that misbehave, for tests/unit/test_rewards.py."""

import os
import time


def misbehave(response: str, answer: str) -> float:
    if response == "hang":
        time.sleep(60)
    if response == "die":
        os._exit(3)
    if response == "raise":
        raise ValueError("cannot parse")
    if response == "nan":
        return float("nan")
    return float(response == answer)
