"""Rewards, and reward functions that hang, raise or die (CASES 20, 21)."""

import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.data.rewards import REWARDS, close_workers, score_responses
from rlk.errors import UsageError

MISBEHAVING = "tests.unit.reward_functions:misbehave"
math = REWARDS["math"]


@pytest.fixture(scope="module", autouse=True)
def stop_workers():
    yield
    close_workers()


def test_exact_ignores_only_white_space_at_the_ends():
    exact = REWARDS["exact"]
    assert exact(" 12\n", "12") == 1.0
    assert exact("1 2", "12") == 0.0


@pytest.mark.parametrize("response, answer, reward", [
    (r"so \boxed{\frac{1}{3}}", "1/3", 1),
    (r"\boxed{\dfrac{1}{2}}", "0.5", 1),
    (r"\boxed{\frac12}", "0.50", 1),
    (r"first \boxed{3}, then \boxed{4}", "4", 1),
    (r"first \boxed{3}, then \boxed{4}", "3", 0),
    ("7 + 5 is 12.", "12", 1),
    ("it costs $1,234,567", "1234567", 1),
    (r"\boxed{1{,}000}", "1000", 1),
    (r"\boxed{-\frac{2}{4}}", "-1/2", 1),
    (r"\boxed{-5}", "5", 0),
    (r"\boxed{x^2 + 1}", "x^2+1", 1),
    (r"\boxed{\text{yes}}", "yes", 1),
    (r"\boxed{2 \\frac{1}", "1", 1),  # never closes: the last number counts
    (r"\boxed{\frac{1}{0}}", "1/0", 1),  # no number, equal as text
    (r"\boxed{1/0}", "5", 0),
    ("no number here", "5", 0),
    ("9" * 5000, "9", 0),
    ("4", r"\boxed{4}", 1),
])
def test_math(response, answer, reward):
    assert math(response, answer) == reward


@settings(deadline=None, max_examples=100)
@given(st.fractions(max_denominator=1000), st.text(max_size=20, alphabet="abc .,\n"))
def test_math_accepts_every_spelling_of_a_fraction(value, words):
    sign, size = "-" if value < 0 else "", abs(value)
    latex = rf"{sign}\frac{{{size.numerator}}}{{{size.denominator}}}"
    assert math(rf"{words}\boxed{{{latex}}}", str(value)) == 1.0
    assert math(f"{words} {value}", latex) == 1.0
    assert math(rf"\boxed{{{value}}}", str(value + Fraction(1, 7))) == 0.0


def test_math_from_a_worker_thread():
    batches = []
    thread = threading.Thread(target=lambda: batches.append(score_responses("math", [r"\boxed{\frac{1}{3}}"], ["1/3"])))
    thread.start()
    thread.join()
    assert batches[0].rewards.tolist() == [1.0] and batches[0].errors == 0


def test_a_function_that_hangs_raises_or_dies_costs_its_own_sample_only():
    score_responses(MISBEHAVING, ["warm"], ["up"])
    start = time.perf_counter()
    batch = score_responses(MISBEHAVING, ["hang", "a", "raise", "b", "die", "nan", "c"], [*"aabbccc"], deadline_s=0.3)
    assert batch.error_mask.tolist() == [True, False, True, False, True, True, False]
    assert batch.rewards.tolist() == [0, 1, 0, 1, 0, 0, 1]
    assert batch.errors == 4 and batch.first_error == "sample 0: no reward within 0.3 s"
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize("name, message", [
    ("exakt", "expected one of exact, math or package.module:function"),
    ("no_such_module:f", "cannot be imported"),
    ("math:pi", "is float, expected a function"),
])
def test_unknown_reward(name, message):
    with pytest.raises(UsageError, match=message):
        score_responses(name, ["1"], ["1"])


def test_no_responses():
    assert score_responses("exact", [], []).rewards.shape == (0,)
