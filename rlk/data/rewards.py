"""Rewards: how a response is scored against the right answer.

Reward functions run in a worker process, because that is the only thing in Python that can be stopped: each sample has
a deadline, and a function that hangs or raises costs that sample, not the run. Such a sample is counted as an error and
masked out; it is not a reward of 0, which would teach the model that a right answer was wrong.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.connection import Connection

import numpy as np

from rlk.errors import UsageError

RewardFunction = Callable[[str, str], float]
START_SECONDS = 60.0  # for a worker to start and import the reward function
NUMBER = r"-?\d+/\d+|-?\d*\.\d+|-?\d+"


def exact(response: str, answer: str) -> float:
    """1 when the texts are equal apart from white space at the ends."""
    return float(response.strip() == answer.strip())


def math(response: str, answer: str) -> float:
    r"""1 when the response's last \boxed{} value, or else its last number, equals the answer.

    Numbers are compared as exact fractions (0.5 = 1/2 = \frac{1}{2}); anything else as text without white space.
    """
    given = last_boxed(response)
    if given is None:
        numbers = re.findall(NUMBER, _plain(response))
        if not numbers:
            return 0.0
        given = numbers[-1]
    wanted = last_boxed(answer) or answer
    given, wanted = _plain(given), _plain(wanted)
    left, right = _value(given), _value(wanted)
    if left is None or right is None:
        return float("".join(given.split()) == "".join(wanted.split()))
    return float(left == right)


REWARDS: dict[str, RewardFunction] = {"exact": exact, "math": math}


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, braces balanced; None when there is none or it never closes."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def _plain(text: str) -> str:
    r"""A LaTeX number without its decoration: \frac{1}{3} is 1/3, $1{,}000$ is 1000."""
    text = re.sub(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}", r"\1/\2", text)
    text = re.sub(r"\\[dt]?frac\s*(\d)\s*(\d)", r"\1/\2", text)
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(left|right|!|,|;|\$|%)|[$]", "", text).replace("{,}", ",").replace("−", "-")
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    return re.sub(r"(\d)\s*/\s*(\d)", r"\1/\2", text).strip().rstrip(".")


def _value(text: str) -> Fraction | None:
    """The exact value of a plain number; None for anything else (a zero denominator, a number beyond int's limit)."""
    if not re.fullmatch(r"[+-]?(\d+(/-?\d+)?|\d*\.\d+)", text):
        return None
    numerator, _, denominator = text.partition("/")
    try:
        return Fraction(numerator) / Fraction(denominator or 1)
    except (ValueError, ZeroDivisionError):
        return None


def find_reward(name: str) -> RewardFunction:
    """The reward function of a name: one of REWARDS, or package.module:function."""
    if name in REWARDS:
        return REWARDS[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise UsageError(f"--reward is {name!r}, expected one of {', '.join(REWARDS)} or package.module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise UsageError(f"--reward {name} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise UsageError(f"--reward {name} is {type(found).__name__}, expected a function (response, answer) -> float")
    return found


@dataclass(frozen=True)
class RewardBatch:
    """Rewards of n responses. Where `error_mask` is true the reward is 0 and must not be learned from."""

    rewards: np.ndarray  # float32 [n]
    error_mask: np.ndarray  # bool [n]
    first_error: str  # empty when there was none

    @property
    def errors(self) -> int:
        return int(self.error_mask.sum())


def score_responses(name: str, responses: list[str], answers: list[str], deadline_s: float = 10.0) -> RewardBatch:
    """Score each response against its answer with the reward `name`, at most `deadline_s` seconds for each.

    Any thread may call this, one at a time. The worker stays for the next call; one that hangs is killed and replaced.
    """
    pairs = list(zip(responses, answers, strict=True))
    results: list[tuple[float, str]] = []
    while len(results) < len(pairs):
        if name not in _workers:
            _workers[name] = _Worker(name)
        results += _workers[name].score(pairs[len(results):], deadline_s)
        if not _workers[name].process.is_alive():
            del _workers[name]
    first_error = next((f"sample {i}: {error}" for i, (_, error) in enumerate(results) if error), "")
    return RewardBatch(np.array([reward for reward, _ in results], np.float32),
                       np.array([bool(error) for _, error in results], bool), first_error)


class _Worker:
    """One process that runs one reward function."""

    def __init__(self, name: str) -> None:
        # spawn: a fork would copy the locks of this process's OpenMP threads in whatever state they are.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(name, theirs), daemon=True, name=f"reward-{name}")
        self.process.start()
        theirs.close()
        error = self.pipe.recv() if self.pipe.poll(START_SECONDS) else f"no sign of life after {START_SECONDS} s"
        if error:
            self.stop()
            raise UsageError(error)

    def score(self, pairs: list[tuple[str, str]], deadline_s: float) -> list[tuple[float, str]]:
        """(reward, '') or (0, what went wrong) of each pair, up to the one that hangs or ends the process, if any."""
        results = []
        try:
            self.pipe.send(pairs)  # all at once: a round trip for each would cost more than the rewards
            while len(results) < len(pairs):
                if not self.pipe.poll(deadline_s):
                    self.stop()
                    return [*results, (0.0, f"no reward within {deadline_s} s")]
                results.append(self.pipe.recv())
        except (EOFError, OSError):
            self.stop()
            results.append((0.0, "the reward function ended its process"))
        return results

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(name: str, pipe: Connection) -> None:
    """The worker's loop. It ends when the parent does, by the end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then ends this
    try:
        function = find_reward(name)
    except UsageError as error:
        pipe.send(str(error))
        return
    pipe.send("")
    while True:
        try:
            pairs = pipe.recv()
        except (EOFError, OSError):
            return
        for response, answer in pairs:
            pipe.send(_guarded(function, response, answer))


def _guarded(function: RewardFunction, response: str, answer: str) -> tuple[float, str]:
    try:
        reward = float(function(response, answer))
    except Exception as error:  # whatever a user's function raises is that sample's error
        return 0.0, f"{type(error).__name__}: {error}"
    return (reward, "") if np.isfinite(reward) else (0.0, f"reward {reward} is not finite")


_workers: dict[str, _Worker] = {}


@atexit.register
def close_workers() -> None:
    """Stop the workers."""
    while _workers:
        _workers.popitem()[1].stop()
