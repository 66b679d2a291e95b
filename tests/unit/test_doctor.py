"""What `rlk doctor` finds, above all the Slurm address (CASES 12)."""

import os
import stat

import pytest

from rlk import doctor
from rlk.doctor import check_rendezvous, diagnose, first_slurm_node, means_this_machine
from rlk.errors import UsageError

TWO_NODES = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-09,12],login1"}


@pytest.fixture(autouse=True)
def no_slurm_on_this_machine(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", ""])
def test_a_loopback_address_on_two_slurm_nodes_is_refused_with_the_right_one(address):
    with pytest.raises(UsageError, match="MASTER_ADDR=gpu07 "):
        check_rendezvous(TWO_NODES | {"MASTER_ADDR": address})


def test_a_real_address_and_a_single_node_pass():
    assert "gpu07" in check_rendezvous(TWO_NODES | {"MASTER_ADDR": "gpu07"})
    assert check_rendezvous({"SLURM_JOB_NUM_NODES": "1", "MASTER_ADDR": "localhost"}) == "one node"
    assert check_rendezvous({"MASTER_ADDR": "localhost"}) == "one node"


@pytest.mark.parametrize("node_list, first", [
    ("gpu[07-09,12]", "gpu07"), ("gpu[1,3]", "gpu1"), ("a1,a2", "a1"), ("node-3", "node-3"), ("r[1-2]n5,x", "r1n5"),
    ("", "<the first node's name>"),
])
def test_first_node_of_a_slurm_list(node_list, first):
    assert first_slurm_node({"SLURM_JOB_NODELIST": node_list}) == first


def test_scontrol_is_asked_where_there_is_one(tmp_path, monkeypatch):
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\nprintf 'asked-%s\\nother\\n' \"$3\"\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: str(fake))
    assert first_slurm_node({"SLURM_JOB_NODELIST": "n[1-2]"}) == "asked-n[1-2]"


def test_a_name_that_resolves_to_loopback_means_this_machine(monkeypatch):
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert means_this_machine("thishost")


def test_one_failed_check_does_not_stop_the_others(monkeypatch):
    def broken():
        raise UsageError("no compiler: install g++")

    monkeypatch.setattr(doctor, "check_kernels", broken)
    findings = {finding.name: finding for finding in diagnose(TWO_NODES)}
    assert not findings["CPU kernels"].ok and findings["CPU kernels"].text == "no compiler: install g++"
    assert not findings["launch"].ok
    assert findings["python"].ok and findings["torch"].ok and findings["host"].ok
