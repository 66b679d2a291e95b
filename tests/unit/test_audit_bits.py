"""Log-probs are compared by their bits, and every way in which an audit could look away is a failure."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk.audit.auditor import Auditor, AuditRow
from rlk.audit.bits import as_bits, compare_bits, show_bits
from rlk.audit.step_record import StepRecord, judge, summarize
from rlk.errors import CheckFailed
from tests.evidence import make_row


def row_of(rollout, train, uid=5, replica="tp0") -> AuditRow:
    rollout, train = (np.array(side, np.float32) for side in (rollout, train))
    return AuditRow(uid, replica, np.array([1, 2, 3], np.int32), np.arange(len(rollout), dtype=np.int32),
                    rollout, train)


def judge_rows(*rows: AuditRow, mode="consistency", expected=None):
    expected = sorted({row.uid for row in rows}) if expected is None else expected
    return judge(StepRecord(4, 0, expected, list(rows)), mode)


def test_zero_and_minus_zero_are_unequal():  # CASES 30
    assert compare_bits(np.array([0.0, 1.0], np.float32), np.array([-0.0, 1.0], np.float32)).tolist() == [0]
    verdict = judge_rows(row_of([-1, 0.0], [-1, -0.0]))
    assert (verdict.compared, verdict.unequal, verdict.ok) == (2, 1, False)
    assert (verdict.first_unequal.rollout_bits, verdict.first_unequal.train_bits) == ("0x00000000", "0x80000000")


def test_nans_are_equal_only_with_the_same_payload():  # CASES 30
    a = np.array([0x7FC00000, 0x7FC00001, 0x7FC00000], np.uint32)
    b = np.array([0x7FC00000, 0x7FC00000, 0xFFC00000], np.uint32)
    assert compare_bits(a.view(np.float32), b.view(np.float32)).tolist() == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.booleans()), max_size=30))
@settings(deadline=None, max_examples=60)
def test_comparison_agrees_with_the_integers(pairs):
    a = np.array([x for x, _, _ in pairs], np.uint32)
    b = np.array([x if same else y for x, y, same in pairs], np.uint32)
    got = compare_bits(a.view(np.float32), b.view(np.float32)).tolist()
    assert got == [i for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)) if x != y]


def test_other_dtypes_and_lengths_are_refused():
    with pytest.raises(CheckFailed, match="float64, expected float32"):
        as_bits(np.zeros(2))
    with pytest.raises(CheckFailed, match="equal shapes"):
        compare_bits(np.zeros(2, np.float32), np.zeros(3, np.float32))


def test_bit_patterns_are_shown_with_their_value():
    assert show_bits(0xBF000000) == "0xbf000000 (-0.5)"


@pytest.mark.parametrize("train", [[-0.2, -0.1], [-0.2], [-0.1], [-0.1, -0.2, -0.3]])
def test_a_shift_by_one_fails(train):  # CASES 3: a 3-token prompt and a 2-token response have two log-probs
    row = row_of([-0.1, -0.2], [-0.1, -0.2])
    assert judge_rows(row).ok and judge_rows(row).compared == 2
    shifted = AuditRow(row.uid, row.replica, row.prompt_tokens, row.tokens, row.rollout, np.array(train, np.float32))
    assert not judge_rows(shifted).ok


def test_a_sample_that_was_not_audited_fails():
    verdict = judge_rows(make_row(1), expected=[1, 2])
    assert verdict.message == "audit: step 4: 1 samples were not audited, the first is 2; expected 2 samples"


@pytest.mark.parametrize("rows, message", [
    ([make_row(1), make_row(9)], "never drawn, the first is 9"),
    ([make_row(1), make_row(1, "tp1"), make_row(2)], "sample 2 has 1 replicas, others have 2"),
    ([make_row(1), make_row(1)], "sample 1 was audited twice for replica tp0"),
])
def test_coverage_holes_are_named(rows, message):
    assert message in judge_rows(*rows, expected=[1, 2]).failures[-1]


def test_replicas_count_apart_from_distinct_samples():
    rows = [make_row(uid, replica) for replica in ("tp0", "tp1", "tp2") for uid in (1, 2)]
    verdict = judge_rows(*rows)
    assert (verdict.compared, verdict.replicas_compared, verdict.ok) == (6, 18, True)


def test_a_replica_that_agrees_with_itself_only_is_unequal():
    distinct, replica = row_of([-1, -2], [-1, -2]), row_of([-1, -3], [-1, -3], replica="tp1")
    verdict = judge_rows(distinct, replica)
    assert (verdict.unequal, verdict.replicas_unequal) == (0, 1)
    first = verdict.first_unequal
    assert (first.replica, first.position, first.rollout_bits, first.train_bits) == (
        "tp1", 1, "0xc0000000", "0xc0400000")


def test_a_replica_with_other_tokens_fails_in_native_mode_too():
    replica = make_row(1, "tp1")
    replica.tokens[0] += 1
    assert "tp1 has other tokens than tp0" in judge_rows(make_row(1), replica, mode="native").message


def test_unequal_bits_are_counted_and_no_failure_in_native_mode():
    verdict = judge_rows(row_of([-1, -2], [-1, -2.5]), mode="native")
    assert (verdict.unequal, verdict.ok) == (1, True)


@pytest.mark.parametrize("mode", ["consistency", "native"])
def test_equal_nans_do_not_pass(mode):
    verdict = judge_rows(row_of([np.nan, -np.inf], [np.nan, -np.inf]), mode=mode)
    assert (verdict.unequal, verdict.not_finite, verdict.ok) == (0, 4, False)


def test_the_verdict_names_the_first_difference():
    verdict = judge_rows(row_of([-0.5, -1], [-0.5, -2], uid=65538))
    assert verdict.message == (
        "audit: 1 of 2 log-probs (replicas included) differ in bits, the first at step 4, sample 65538 (tp0), "
        "position 1 (token 1): rollout 0xbf800000 (-1.0), train 0xc0000000 (-2.0)")


def test_nothing_compared_is_no_pass():
    assert summarize([], "consistency", {})["verdict"] == "fail"


def test_a_failed_gate_or_a_missing_step_is_no_pass():
    auditor = Auditor(None, "consistency")
    auditor.add_step(0, 0, [make_row(1)], [1])
    assert auditor.finish({"a": True})["verdict"] == "pass"
    assert auditor.finish({"a": True, "b": False})["failures"] == ["gate not passed: b"]
    auditor.add_step(2, 2, [make_row(1)], [1])
    assert auditor.finish({})["failures"] == ["the audited steps are [0, 2]; expected consecutive numbers"]


length = st.integers(0, 4)
shape = st.tuples(st.integers(0, 2**40), length, length, length, length)


@given(st.lists(shape, max_size=5, unique_by=lambda row: row[0]))
@settings(deadline=None, max_examples=40)
def test_a_record_survives_its_file_byte_for_byte(tmp_path_factory, shapes):
    rows = [AuditRow(uid, f"tp{uid % 3}", np.arange(p, dtype=np.int32), np.arange(r, dtype=np.int32),
                     np.linspace(-1, 0, a, dtype=np.float32), np.linspace(-2, 0, b, dtype=np.float32))
            for uid, p, r, a, b in shapes]
    record = StepRecord(7, 3, [row.uid for row in rows], rows)
    path = tmp_path_factory.mktemp("npz") / record.file_name
    path.write_bytes(record.to_npz())
    loaded, damaged = StepRecord.load(path)
    assert not damaged
    assert loaded.to_npz() == record.to_npz()
    assert judge(loaded, "consistency") == judge(record, "consistency")
