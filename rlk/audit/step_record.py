"""What one step leaves as evidence, and the judgement on it. The auditor and `rlk validate` share both.

Layout of audit/step-*.npz; N rows, one per sample and replica; P and R are prompt and response tokens of all rows.
    step, policy_version   int64 []
    expected_uids          int64 [samples]   what rollout drew
    uids                   int64 [N]         the first row of a uid is the distinct one, later rows are its replicas
    replicas               str   [N]         who recomputed the row, for example "tp1"
    lengths                int64 [N, 4]      prompt tokens, response tokens, rollout log-probs, train log-probs
    prompt_tokens, tokens  int32 [P], [R]    rows one after the other, likewise
    rollout_bits, train_bits  uint32 [R]     the FP32 log-probs as bit patterns
    sequence_sha256        uint8 [N, 32]     of uid, prompt length, prompt and response
"""

from __future__ import annotations

import hashlib
import io
import itertools
import struct
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rlk.audit.bits import as_bits, show_bits


@dataclass(frozen=True)
class AuditRow:
    """One sample's response as one replica saw it."""

    uid: int  # of the sample (rlk.rollout.engine)
    replica: str  # for example "tp1"
    prompt_tokens: np.ndarray  # int32 [P]
    tokens: np.ndarray  # int32 [R]
    rollout: np.ndarray  # float32 [R], as sampled; or its uint32 bit patterns
    train: np.ndarray  # float32 [R], as recomputed; or its uint32 bit patterns

    def sequence_digest(self) -> bytes:
        """SHA-256 over uid, prompt length, prompt and response as little-endian integers, 32 bytes."""
        head = struct.pack("<qq", self.uid, len(self.prompt_tokens))
        sequence = np.concatenate([self.prompt_tokens, self.tokens]).astype("<i4")
        return hashlib.sha256(head + sequence.tobytes()).digest()


@dataclass(frozen=True)
class StepRecord:
    """Every row of one step, with the samples that it must cover."""

    step: int
    policy_version: int
    expected_uids: list[int]
    rows: list[AuditRow]

    @property
    def file_name(self) -> str:
        return f"step-{self.step:05d}.npz"

    def to_npz(self) -> bytes:
        """The step's file: an uncompressed npz, the same bytes for the same record."""
        rows = self.rows

        def joined(arrays: list, dtype: type) -> np.ndarray:
            return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)

        buffer = io.BytesIO()
        np.savez(
            buffer,
            step=np.int64(self.step),
            policy_version=np.int64(self.policy_version),
            expected_uids=np.array(self.expected_uids, np.int64),
            uids=np.array([row.uid for row in rows], np.int64),
            replicas=np.array([row.replica for row in rows], np.str_),
            lengths=np.array([_lengths(row) for row in rows], np.int64).reshape(-1, 4),
            prompt_tokens=joined([row.prompt_tokens for row in rows], np.int32),
            tokens=joined([row.tokens for row in rows], np.int32),
            rollout_bits=joined([as_bits(row.rollout) for row in rows], np.uint32),
            train_bits=joined([as_bits(row.train) for row in rows], np.uint32),
            sequence_sha256=np.frombuffer(b"".join(row.sequence_digest() for row in rows), np.uint8).reshape(-1, 32),
        )
        return buffer.getvalue()

    @classmethod
    def load(cls, path: Path) -> tuple[StepRecord, list[str]]:
        """Read a step's file; returns the record and one line per sequence whose hash does not fit.

        Raises ValueError when the arrays do not fit together.
        """
        arrays = _read_npz(path)
        lengths = arrays["lengths"]
        columns = {}
        for column, name in enumerate(("prompt_tokens", "tokens", "rollout_bits", "train_bits")):
            if lengths[:, column].sum() != arrays[name].size or (lengths[:, column] < 0).any():
                raise ValueError(f"{name} has {arrays[name].size} entries, its lengths say {lengths[:, column].sum()}")
            columns[name] = np.split(arrays[name], np.cumsum(lengths[:, column])[:-1])
        count = len(lengths)
        for name in ("uids", "replicas", "sequence_sha256"):
            if len(arrays[name]) != count:
                raise ValueError(f"{name} has {len(arrays[name])} rows, lengths has {count}")
        rows = [
            AuditRow(int(arrays["uids"][i]), str(arrays["replicas"][i]), *(parts[i] for parts in columns.values()))
            for i in range(count)
        ]
        damaged = [
            f"step {int(arrays['step'])}, sample {row.uid} ({row.replica}): the tokens do not have the recorded SHA-256"
            for row, digest in zip(rows, arrays["sequence_sha256"], strict=True)
            if row.sequence_digest() != digest.tobytes()
        ]
        expected = arrays["expected_uids"].tolist()
        return cls(int(arrays["step"]), int(arrays["policy_version"]), expected, rows), damaged


@dataclass(frozen=True)
class Unequal:
    """One log-prob whose two sides differ in at least one bit."""

    step: int
    sample: int  # uid
    replica: str
    position: int  # in the response, from 0
    token: int  # id at that position, -1 when there is none
    rollout_bits: str  # eight hexadecimal digits after 0x
    train_bits: str

    def __str__(self) -> str:
        rollout, train = (show_bits(int(bits, 16)) for bits in (self.rollout_bits, self.train_bits))
        return (f"step {self.step}, sample {self.sample} ({self.replica}), position {self.position} "
                f"(token {self.token}): rollout {rollout}, train {train}")


@dataclass(frozen=True)
class StepVerdict:
    """The judgement on one step; `failures` holds one line per broken promise."""

    step: int
    compared: int  # log-probs of distinct samples
    unequal: int
    replicas_compared: int  # log-probs of all rows, the distinct ones included
    replicas_unequal: int
    not_finite: int  # infinite or NaN log-probs, both sides of all rows
    first_unequal: Unequal | None
    failures: list[str]

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def message(self) -> str:
        """One line that names what failed first: for unequal bits the step, sample, position and both bit patterns."""
        more = f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""
        return f"audit: {self.failures[0]}{more}" if self.failures else "audit: passed"


def judge(record: StepRecord, mode: str) -> StepVerdict:
    """Compare the two sides of every row, and every replica with its distinct row, bit by bit.

    In mode "native" unequal bits are counted and are no failure. Missing, extra or misaligned samples and log-probs
    that are not finite are failures in either mode: an audit that skipped them would prove nothing.
    """
    failures = _coverage_failures(record)
    compared, unequal, not_finite = Counter(), Counter(), 0
    first: Unequal | None = None
    distinct_rows: dict[int, AuditRow] = {}
    for row in record.rows:
        distinct = distinct_rows.setdefault(row.uid, row)
        kind = "distinct" if row is distinct else "replica"
        if len({len(row.tokens), len(row.rollout), len(row.train)}) > 1:
            failures.append(
                f"step {record.step}, sample {row.uid} ({row.replica}) has {len(row.tokens)} response tokens, "
                f"{len(row.rollout)} rollout and {len(row.train)} train log-probs; expected one of each per token")
        if row.sequence_digest() != distinct.sequence_digest():
            failures.append(f"step {record.step}, sample {row.uid}: {row.replica} has other tokens than "
                            f"{distinct.replica}; every replica must train on the same sequence")
        bad = _unequal_positions(row, distinct)
        compared[kind] += min(len(row.rollout), len(row.train))
        unequal[kind] += len(bad)
        not_finite += _count_not_finite(row)
        if len(bad) and first is None:
            first = _name_position(record.step, row, distinct, int(bad[0]))
    if first and mode == "consistency":
        failures.append(f"{unequal.total()} of {compared.total()} log-probs (replicas included) differ in bits, "
                        f"the first at {first}")
    if not_finite:
        failures.append(f"step {record.step}: {not_finite} log-probs are infinite or NaN; expected finite numbers")
    return StepVerdict(record.step, compared["distinct"], unequal["distinct"], compared.total(), unequal.total(),
                       not_finite, first, failures)


def summarize(verdicts: list[StepVerdict], mode: str, gates: dict[str, bool]) -> dict:
    """The content of audit.json: totals over the steps, and a verdict that needs every gate and every step."""
    failures = [line for verdict in verdicts for line in verdict.failures]
    failures += [f"gate not passed: {name}" for name, passed in gates.items() if not passed]
    steps = [verdict.step for verdict in verdicts]
    if any(later != earlier + 1 for earlier, later in itertools.pairwise(steps)):
        failures.append(f"the audited steps are {steps}; expected consecutive numbers")
    compared = sum(verdict.compared for verdict in verdicts)
    if not compared:
        failures.append("no log-prob was compared; expected at least one")
    first = next((verdict.first_unequal for verdict in verdicts if verdict.first_unequal), None)
    return {
        "verdict": "fail" if failures else "pass",
        "mode": mode,
        "steps": len(steps),
        "compared": compared,
        "unequal": sum(verdict.unequal for verdict in verdicts),
        "replicas_compared": sum(verdict.replicas_compared for verdict in verdicts),
        "replicas_unequal": sum(verdict.replicas_unequal for verdict in verdicts),
        "not_finite": sum(verdict.not_finite for verdict in verdicts),
        "first_unequal": asdict(first) if first else None,
        "gates": gates,
        "failures": failures,
    }


def _lengths(row: AuditRow) -> tuple[int, int, int, int]:
    return len(row.prompt_tokens), len(row.tokens), len(row.rollout), len(row.train)


def _coverage_failures(record: StepRecord) -> list[str]:
    """Every expected sample has rows, each replica once, all samples equally many; nothing else has rows."""
    rows_of = Counter(row.uid for row in record.rows)
    most = max(rows_of.values(), default=0)
    missing = sorted(set(record.expected_uids) - set(rows_of))
    extra = sorted(set(rows_of) - set(record.expected_uids))
    few = sorted(uid for uid, count in rows_of.items() if count < most)
    twice = sorted(key for key, count in Counter((row.uid, row.replica) for row in record.rows).items() if count > 1)
    failures = []
    if missing:
        failures.append(f"step {record.step}: {len(missing)} samples were not audited, the first is {missing[0]}; "
                        f"expected {len(set(record.expected_uids))} samples")
    if extra:
        failures.append(f"step {record.step}: {len(extra)} audited samples were never drawn, the first is {extra[0]}")
    if few:
        failures.append(f"step {record.step}: sample {few[0]} has {rows_of[few[0]]} replicas, others have {most}")
    if twice:
        failures.append(f"step {record.step}: sample {twice[0][0]} was audited twice for replica {twice[0][1]}")
    return failures


def _unequal_positions(row: AuditRow, distinct: AuditRow) -> np.ndarray:
    """Positions where the row's two sides differ, or (for a replica) where it differs from the distinct row."""
    length = min(len(row.rollout), len(row.train))
    train = as_bits(row.train)[:length]
    bad = as_bits(row.rollout)[:length] != train
    common = min(length, len(distinct.rollout))
    bad[:common] |= as_bits(distinct.rollout)[:common] != train[:common]
    return np.flatnonzero(bad)


def _name_position(step: int, row: AuditRow, distinct: AuditRow, position: int) -> Unequal:
    rollout, train = (int(as_bits(side)[position]) for side in (row.rollout, row.train))
    if rollout == train:  # the replica agrees with itself and not with the distinct row
        rollout = int(as_bits(distinct.rollout)[position])
    token = int(row.tokens[position]) if position < len(row.tokens) else -1
    return Unequal(step, row.uid, row.replica, position, token, f"0x{rollout:08x}", f"0x{train:08x}")


def _count_not_finite(row: AuditRow) -> int:
    exponent = np.uint32(0x7F800000)  # all ones: infinity or NaN
    return sum(int(((as_bits(side) & exponent) == exponent).sum()) for side in (row.rollout, row.train))


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """An npz's arrays. A member whose checksum is wrong is read all the same: the flipped bit is to be named."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            try:
                data = archive.read(member)
            except zipfile.BadZipFile:
                data = _stored_bytes(path, member)
            name = member.filename.removesuffix(".npy")
            arrays[name] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return arrays


def _stored_bytes(path: Path, member: zipfile.ZipInfo) -> bytes:
    """An uncompressed zip member's bytes, unchecked. Its local header ends with the lengths of name and extra field."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member.filename} is damaged and compressed")
    with open(path, "rb") as file:
        file.seek(member.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
        file.seek(name_length + extra_length, io.SEEK_CUR)
        return file.read(member.file_size)
