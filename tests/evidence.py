"""A small finished run directory, made through the same calls as the trainer's, for the audit's and report's tests."""

from pathlib import Path

import numpy as np

from rlk.audit.auditor import Auditor, AuditRow
from rlk.audit.run_directory import RunDirectory
from rlk.contract import Contract
from rlk.report.metrics import StepMetrics

CONTRACT = Contract("cpu", "float32", 2, "fma", 0, software={"torch": "2.13.0", "kernels": "ab" * 32})


def make_row(uid: int, replica: str = "tp0", length: int = 3) -> AuditRow:
    """A row whose two sides are equal; its content depends on uid alone, so that replicas agree."""
    random = np.random.default_rng(uid)
    logprobs = -random.random(length, np.float32) - np.float32(0.1)
    prompt, tokens = (random.integers(0, 500, size, dtype=np.int32) for size in (2, length))
    return AuditRow(uid, replica, prompt, tokens, logprobs, logprobs.copy())


def make_seal() -> dict:
    return {"sources": {"rlk/a.py": "1" * 64}, "objects": {"librlk.so": "2" * 64},
            "model": {"model.safetensors": "3" * 64}, "prompts": {"prompts.jsonl": "4" * 64},
            "versions": {"torch": "2.13.0"}, "hardware": {"cores": "2"}}


def make_readback(rank: int, mode: str = "consistency") -> dict:
    contract = mode == "consistency"
    call = {"op": "linear", "backend": "cpu" if contract else "reference", "device": "cpu", "dtype": "float32",
            "contract": contract, "calls": 7}
    return {"rank": rank, "world": 2, "mode": mode, "architecture": "cpu",
            "contract_fingerprint": CONTRACT.fingerprint, "collectives": {"tp": "shm"},
            "fallbacks": 0 if contract else 7, "calls": [call]}


def write_run(path: Path, mode: str = "consistency", steps: int = 2, unequal: int = 0) -> RunDirectory:
    """Write every file but COMPLETE; `unequal` log-probs of each step's first sample differ in one bit."""
    run = RunDirectory.create(path)
    run.write_config({"model": "build/tiny/model", "mode": mode, "steps": steps, "lr": 1e-6,
                      "rollout_batch_size": 1, "samples_per_prompt": 2, "tp": 2}, {"mode": "default"})
    run.write_contract(CONTRACT)
    run.write_seal("before", make_seal())
    auditor = Auditor(run, mode)
    for step in range(steps):
        uids = [step << 16 | sample for sample in range(2)]
        rows = [make_row(uid, replica) for replica in ("tp0", "tp1") for uid in uids]
        for row in rows[::2]:
            row.train.view(np.uint32)[:unequal] ^= 1
        verdict = auditor.add_step(step, step, rows, uids)
        run.append_metrics(StepMetrics(step, step, 0.4 + 0.1 * step, 6, verdict.compared, verdict.unequal,
                                       0.4, 0.7, 1.2, {"loss": 0.0}).as_dict())
    for rank in range(2):
        run.write_readback(make_readback(rank, mode))
    run.write_seal("after", make_seal())
    auditor.finish({"every step ran": True})
    return run


def finished_run(path: Path, mode: str = "consistency", **options) -> RunDirectory:
    run = write_run(path, mode, **options)
    run.complete()
    return run
