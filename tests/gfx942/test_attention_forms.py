"""Which attention kernel a call launches on either architecture, and what is copied before; nothing is executed. And
what Hopper's own kernel became in machine code."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from rlk.build.triton_aot import compile_variant
from rlk.kernels import attention, attention_hopper, attention_plan
from rlk.kernels.attention_plan import decode_plan
from tests.gfx942.test_launchers import stand_in

G, GROUP = 2, 4
LONG = [(0, 190, 0, 0)]
LONG_AND_SHORT = [(0, 190, 0, 0), (190, 10, 0, 1)]


class Call:
    """A call's queries, keys and values, in rows and in pages."""

    def __init__(self, E):
        self.q = torch.zeros(200, G * GROUP, E, dtype=torch.bfloat16)
        self.k = torch.zeros(200, G, E, dtype=torch.bfloat16)
        self.pages, self.block_table = torch.zeros(13, 16, G, E, dtype=torch.bfloat16), table([list(range(13))] * 2)

    def rows(self, segments, k=None, v=None):
        k, v = (self.k if x is None else x for x in (k, v))
        attention.attention_varlen(self.q, k, v, table(segments), table([0, 190]))

    def paged(self, segments):
        plan = attention.make_plan(table(segments), self.q, G, 2, 208, paged=True)
        attention.attention_paged(self.q, self.pages, self.pages, plan, self.block_table)

    def step(self, rows, keys):
        """A decode step of so many sequences."""
        pages = -(-keys // 16)
        segments = table([(i, 1, keys - 1, 0) for i in range(rows)])
        attention.attention_paged(self.q[:1].expand(rows, -1, -1).contiguous(), self.pages, self.pages,
                                  decode_plan(segments, keys), torch.zeros(1, pages, dtype=torch.int32))


def table(rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.fixture(params=["gfx942", "sm_90"])
def launched(request, monkeypatch):
    """(The architecture, the labels of what is launched)."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    near = [variant for variant in attention.variants(request.param) if not variant.name.endswith("_far")]
    return request.param, stand_in(monkeypatch, [attention], near, request.param, execute=False)


def test_every_variant_is_launched_by_some_call_and_no_other(launched):
    arch, labels = launched
    for E in attention.HEAD_DIMS:
        call = Call(E)
        for segments in (LONG, LONG_AND_SHORT):
            call.rows(segments)
            call.paged(segments)
        call.rows([(i, 1, 0, 0) for i in range(200)])
        call.paged([(i, 1, 0, 0) for i in range(200)])
        call.step(1, 64)
        call.step(200, 64)
    assert set(labels) == {v.label for v in attention.variants(arch) if not v.name.endswith("_far")}


def test_long_rows_of_keys_have_hoppers_own_kernel_and_pages_the_common_one(launched):
    arch, labels = launched
    Call(64).rows(LONG)
    Call(64).paged(LONG)
    own = "hopper_128" if arch == "sm_90" else "prefill_64_w4"
    common = "prefill_128_w8" if arch == "sm_90" else "prefill_64_w4"
    kernel = "attention_hopper" if arch == "sm_90" else "attention_prefill"
    assert labels == [f"{kernel}/{own}_varlen_e64", f"attention_prefill/{common}_paged_e64"]


@pytest.mark.parametrize("segments", [LONG, LONG_AND_SHORT], ids=["long", "long and short"])
def test_values_in_another_layout_are_taken_whatever_the_other_segments(launched, segments):
    call = Call(64)
    wide = torch.zeros(200, 3 * G, 64, dtype=torch.bfloat16)[:, G:2 * G]
    heads_first = torch.zeros(G, 200, 64, dtype=torch.bfloat16).transpose(0, 1)
    for v in (wide, heads_first):
        call.rows(segments, v=v)
        call.rows(segments, k=v)


def test_only_a_kernel_with_one_stride_has_values_copied(launched, monkeypatch):
    arch, _ = launched
    call, copies = Call(64), []
    wide = torch.zeros(200, 3 * G, 64, dtype=torch.bfloat16)[:, G:2 * G]
    plain = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: (copies.append(x), plain(x))[1])
    call.rows(LONG, v=wide)
    assert bool([x for x in copies if x is wide]) == (arch == "gfx942")
    copies.clear()
    call.rows(LONG_AND_SHORT, v=wide)
    assert [x for x in copies if x is wide]


def test_a_plan_of_taller_tiles_is_refused(launched, monkeypatch):
    call = Call(64)
    tall = attention_plan.plan(table(LONG), 200, GROUP, 16, 256, 2, 200, call.q.device)
    with pytest.raises(ValueError, match="a plan for tiles of 64 rows x 4 heads, expected at most .* keys in rows"):
        attention.attention_varlen(call.q, call.k, call.k, tall, table([0, 190]))


@pytest.mark.parametrize("E", attention.HEAD_DIMS)
def test_hoppers_kernel_keeps_its_sums_in_registers_and_lets_its_groups_multiply_asynchronously(E):
    """A compiler that spills, or waits for each product, gives the same bits at half the speed."""
    (variant,) = [v for v in attention.variants("sm_90") if v.kernel == "attention_hopper" and v.constants["E"] == E]
    path = compile_variant(variant, "sm_90").path

    def dumped(what):
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        return subprocess.run([tool, what, path], capture_output=True, text=True, check=True).stdout

    assert re.search(r"REG:168 STACK:0 .* LOCAL:0 ", dumped("-res-usage"))
    code = dumped("-sass")
    registers = {int(n, 16) for n in re.findall(r"USETMAXREG\S* (?:UP0, )?(0x[0-9a-f]+)", code)}
    assert {attention_hopper.COMPUTE_REGISTERS.value, attention_hopper.LOAD_REGISTERS.value} <= registers
    # A group: q . k of the first block; in the loop q . k, P x ones and P V; P x ones and P V of the last block.
    in_block = attention.ATTENTION_BLOCK // 16
    assert code.count("HGMMA") == 2 * (2 * E // 16 + 4 * in_block)
    assert code.count("WARPGROUP.DEPBAR") == 2 * 4  # the first products; q . k and the sums of a turn; the last sums
