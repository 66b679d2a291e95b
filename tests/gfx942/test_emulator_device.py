"""The emulator's launches: hand-written kernels, whole."""

import numpy as np
import pytest

from tests.gfx942.assembly import assemble, kernel, module
from tests.gfx942.emulator import Device, Launch, OutsideMemory, UnknownInstruction
from tests.gfx942.emulator.device import Deadlock

ORDERS = ("forward", "reverse")

# out[lane] = in[255 - lane], through LDS
REVERSE = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[4:5]
    v_sub_u32 v3, 1020, v1
    s_waitcnt vmcnt(0)
    ds_write_b32 v3, v2 offset:{store}
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v4, v1 offset:{load}
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v4, s[6:7]
"""

# out[n] = packed lanes of workgroup n, plus its ids in x, y, z above
IDS = """
    s_load_dwordx2 s[8:9], s[0:1], 0x0
    s_mul_i32 s6, s4, 3
    s_mul_i32 s7, s3, 1
    s_add_i32 s6, s6, s7
    s_mul_i32 s6, s6, 2
    s_add_i32 s6, s6, s2
    s_mul_i32 s6, s6, 24
    v_and_b32 v1, 0x3ff, v0
    v_bfe_u32 v2, v0, 10, 10
    v_bfe_u32 v3, v0, 20, 10
    v_mad_u32_u24 v4, v3, 3, v2
    v_mad_u32_u24 v4, v4, 4, v1
    v_add_u32 v4, s6, v4
    v_lshlrev_b32 v4, 4, v4
    v_mov_b32 v6, s2
    v_mov_b32 v7, s3
    v_mov_b32 v8, s4
    v_mov_b32 v9, v0
    s_waitcnt lgkmcnt(0)
    global_store_dwordx4 v4, v[6:9], s[8:9]
"""

# wait until flag == 1, then out = 5; where `limit` polls are allowed, out = 9 after them
WAITER = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_mov_b32 v1, 0
    v_mov_b32 v2, 5
    s_mov_b32 s8, {limit}
    s_waitcnt lgkmcnt(0)
.L{name}_poll:
    global_load_dword v3, v1, s[4:5] sc0 sc1
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s9, v3
    s_cmp_eq_u32 s9, 1
    s_cbranch_scc1 .L{name}_ready
    {sleep}
    s_sub_i32 s8, s8, 1
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc0 .L{name}_poll
    v_mov_b32 v2, 9
.L{name}_ready:
    global_store_dword v1, v2, s[6:7]
"""
SETTER = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_mov_b32 v1, 0
    v_mov_b32 v2, 1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[4:5] sc0 sc1
"""

# the same with a limit in ticks of the clock
TIMED = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_mov_b32 v1, 0
    s_memrealtime s[10:11]
    s_waitcnt lgkmcnt(0)
.L{name}_poll:
    global_load_dword v3, v1, s[4:5] sc0 sc1
    {sleep}
    s_memrealtime s[12:13]
    s_waitcnt vmcnt(0) lgkmcnt(0)
    v_readfirstlane_b32 s9, v3
    s_sub_u32 s12, s12, s10
    s_cmp_eq_u32 s9, 1
    s_cselect_b32 s9, 5, 9
    s_cbranch_scc1 .L{name}_ready
    s_cmp_lt_u32 s12, 2000
    s_cbranch_scc1 .L{name}_poll
.L{name}_ready:
    v_mov_b32 v2, s9
    global_store_dword v1, v2, s[6:7]
"""

# waves other than the first end at once; the first must get past the barrier alone
EARLY_END = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_readfirstlane_b32 s6, v0
    s_cmp_lg_u32 s6, 0
    s_cbranch_scc1 .Learly_end_end
    s_barrier
    v_mov_b32 v1, 0
    v_mov_b32 v2, 77
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[4:5]
.Learly_end_end:
"""

# the second wave waits in LDS for the first, or the first for the second, and never sleeps
LOCAL_SPIN = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_readfirstlane_b32 s6, v0
    v_mov_b32 v1, 0
    v_mov_b32 v2, 3
    s_cmp_lg_u32 s6, {setter}
    s_cbranch_scc1 .Lspin{setter}_poll
    ds_write_b32 v1, v2
    s_branch .Lspin{setter}_end
.Lspin{setter}_poll:
    ds_read_b32 v3, v1
    s_waitcnt lgkmcnt(0)
    v_readfirstlane_b32 s7, v3
    s_cmp_lg_u32 s7, 3
    s_cbranch_scc1 .Lspin{setter}_poll
    global_store_dword v1, v3, s[4:5]
.Lspin{setter}_end:
"""

# out = the dispatch packet's workgroup and grid sizes and its kernarg address, less the one in s[2:3]
PACKET = """
    s_load_dwordx2 s[8:9], s[2:3], 0x0
    s_load_dwordx4 s[12:15], s[0:1], 0x0
    s_load_dwordx2 s[16:17], s[0:1], 0x10
    s_load_dwordx2 s[18:19], s[0:1], 0x28
    v_mov_b32 v1, 0
    s_waitcnt lgkmcnt(0)
    s_sub_u32 s18, s18, s2
    v_mov_b32 v2, s13
    v_mov_b32 v3, s14
    v_mov_b32 v4, s15
    v_mov_b32 v5, s16
    v_mov_b32 v6, s18
    global_store_dwordx4 v1, v[2:5], s[8:9]
    global_store_dword v1, v6, s[8:9] offset:16
"""

# the first words of the arguments are in registers, with and without the code for older firmware
PRELOADED = """
    s_trap 2
    .p2align 8
    v_mov_b32 v1, 0
    v_mov_b32 v2, s4
    global_store_dword v1, v2, s[2:3]
    v_mov_b32 v2, s6
    global_store_dword v1, v2, s[2:3] offset:4
"""


def packed_kernels(folder):
    return assemble(module(
        kernel("reverse", REVERSE.format(store=0, load=0), 2, lds=1024),
        kernel("wrong_store", REVERSE.format(store=4, load=0), 2, lds=1024),
        kernel("wrong_load", REVERSE.format(store=0, load=4096), 2, lds=1024),
        kernel("ids", IDS, 1, ids="xyz", lanes=2),
        kernel("waiter", WAITER.format(name="waiter", limit=1 << 30, sleep="s_sleep 1"), 2),
        kernel("restless", WAITER.format(name="restless", limit=1 << 30, sleep=""), 2),
        kernel("patient", WAITER.format(name="patient", limit=500, sleep="s_sleep 1"), 2),
        kernel("timed", TIMED.format(name="timed", sleep="s_sleep 1"), 2),
        kernel("timed_restless", TIMED.format(name="timed_restless", sleep=""), 2),
        kernel("setter", SETTER, 1),
        kernel("early_end", EARLY_END, 1),
        kernel("spin_on_first", LOCAL_SPIN.format(setter=0), 1, lds=4),
        kernel("spin_on_second", LOCAL_SPIN.format(setter=64), 1, lds=4),
        kernel("packet", PACKET, 1, dispatch=True),
        kernel("preloaded", PRELOADED, 2, preload=4),
        kernel("strange", "v_cvt_off_f32_i4 v1, v0", 1),
    ), folder)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return packed_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("order", ORDERS)
def test_barrier_orders_local_memory(kernels, order):
    device = Device(order)
    x = np.arange(256, dtype=np.uint32) * 3
    source, target = device.put(x), device.put(np.zeros(256, np.uint32))
    device.launch(kernels, "reverse", (1, 1, 1), 256, [source, target])
    np.testing.assert_array_equal(device.get(target, 256, np.uint32), x[::-1])
    assert device.executed == 4 * 13


@pytest.mark.parametrize("order", ORDERS)
def test_workgroups_and_lanes_have_their_ids(kernels, order):
    device = Device(order)
    out = device.put(np.zeros((4 * 3 * 2, 24, 4), np.uint32))
    device.launch(kernels, "ids", (2, 3, 4), (4, 3, 2), [out])
    expected = [[(x, y, z, lx | ly << 10 | lz << 20) for lz in range(2) for ly in range(3) for lx in range(4)]
                for z in range(4) for y in range(3) for x in range(2)]
    np.testing.assert_array_equal(device.get(out, (24, 24, 4), np.uint32), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("waiter", ["waiter", "restless", "timed"])
@pytest.mark.parametrize("waiter_first", [True, False])
def test_launches_wait_for_each_other(kernels, order, waiter, waiter_first):
    device = Device(order)
    flag, out = device.put(np.zeros(1, np.uint32)), device.put(np.zeros(1, np.uint32))
    launches = [Launch(kernels, waiter, (1, 1, 1), 64, (flag, out)), Launch(kernels, "setter", (1, 1, 1), 64, (flag,))]
    device.launch_together(launches if waiter_first else launches[::-1])
    assert device.get(out, 1, np.uint32)[0] == 5


@pytest.mark.parametrize("name", ["patient", "timed", "timed_restless"])
def test_spin_with_a_limit_reaches_it(kernels, name):
    device = Device()
    flag, out = device.put(np.zeros(1, np.uint32)), device.put(np.zeros(1, np.uint32))
    device.launch(kernels, name, (1, 1, 1), 64, (flag, out))
    assert device.get(out, 1, np.uint32)[0] == 9


def test_deadlock_names_the_waiting_wave(kernels, monkeypatch):
    monkeypatch.setattr("tests.gfx942.emulator.device.IDLE_INSTRUCTIONS", 20_000)
    device = Device()
    flag, out = device.put(np.zeros(1, np.uint32)), device.put(np.zeros(1, np.uint32))
    with pytest.raises(Deadlock, match=r"20000 instr.* workgroup \(0, 0, 0\) is in waiter at 0x\w+, 's_sub_i32"):
        device.launch(kernels, "waiter", (1, 1, 1), 64, (flag, out))


@pytest.mark.parametrize("order", ORDERS)
def test_barrier_does_not_wait_for_ended_waves(kernels, order):
    device = Device(order)
    out = device.put(np.zeros(1, np.uint32))
    device.launch(kernels, "early_end", (1, 1, 1), 256, [out])
    assert device.get(out, 1, np.uint32)[0] == 77


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["spin_on_first", "spin_on_second"])
def test_spin_that_never_sleeps_gives_others_a_turn(kernels, order, name):
    device = Device(order)
    out = device.put(np.zeros(1, np.uint32))
    device.launch(kernels, name, (1, 1, 1), 128, [out])
    assert device.get(out, 1, np.uint32)[0] == 3


def test_dispatch_packet_describes_the_launch(kernels):
    device = Device()
    out = device.put(np.zeros(5, np.uint32))
    device.launch(kernels, "packet", (3, 2, 1), (16, 4, 1), [out])
    assert device.get(out, 5, np.uint32).tolist() == [16 | 4 << 16, 1, 48, 8, 0]


@pytest.mark.parametrize("order, last", [("forward", 6), ("reverse", 0)])
def test_preloaded_arguments_skip_the_prologue(kernels, order, last):
    device = Device(order)
    out = device.put(np.zeros(2, np.uint32))
    device.launch(kernels, "preloaded", (7, 1, 1), 1, [out, 1234])
    assert device.get(out, 2, np.uint32).tolist() == [1234, last]  # the workgroup that ran last


@pytest.mark.parametrize("name, bytes_", [("wrong_store", "4 bytes at 0x400"), ("wrong_load", "4 bytes at 0x10fc")])
def test_local_access_outside_names_kernel_and_address(kernels, name, bytes_):
    device = Device()
    source, target = device.put(np.zeros(256, np.uint32)), device.put(np.zeros(256, np.uint32))
    with pytest.raises(OutsideMemory, match=rf"{name} at 0x\w+, 'ds_\w+ .*': {bytes_} .*1024 bytes of LDS"):
        device.launch(kernels, name, (1, 1, 1), 256, [source, target])


def test_null_pointer_names_kernel_and_address(kernels):
    device = Device()
    target = device.put(np.zeros(256, np.uint32))
    with pytest.raises(OutsideMemory, match=r"reverse at 0x\w+, 'global_load_dword .*': 4 bytes at 0x0 .*global"):
        device.launch(kernels, "reverse", (1, 1, 1), 256, [0, target])


def test_array_that_is_too_short_raises(kernels):
    device = Device()
    source, target = device.put(np.zeros(255, np.uint32)), device.put(np.zeros(256, np.uint32))
    with pytest.raises(OutsideMemory, match=f"4 bytes at {source + 1020:#x}"):
        device.launch(kernels, "reverse", (1, 1, 1), 256, [source, target])


def test_unknown_instruction_raises_before_anything_runs(kernels):
    device = Device()
    with pytest.raises(UnknownInstruction, match="strange: 'v_cvt_off_f32_i4_e32 v1, v0'"):
        device.launch(kernels, "strange", (1, 1, 1), 64, [0])
    assert device.executed == 0


def test_wrong_launches_are_refused(kernels):
    device = Device()
    with pytest.raises(ValueError, match="512 lanes .* at most 256"):
        device.launch(kernels, "reverse", (1, 1, 1), 512, [0, 0])
    with pytest.raises(ValueError, match="65540 bytes of LDS, expected at most 256 and 65536"):
        device.launch(kernels, "reverse", (1, 1, 1), 256, [0, 0], shared=64516)
    with pytest.raises(ValueError, match="got 5 arguments, expected 2"):
        device.launch(kernels, "reverse", (1, 1, 1), 256, [0] * 5)
    with pytest.raises(ValueError, match="no kernel 'missing': it has reverse"):
        device.launch(kernels, "missing", (1, 1, 1), 256, [])
    with pytest.raises(ValueError, match="'sideways'"):
        Device("sideways")


def test_device_memory_is_bounded():
    device = Device(size=4096)
    address = device.put(np.arange(10))
    np.testing.assert_array_equal(device.get(address, (2, 5), np.int64), np.arange(10).reshape(2, 5))
    with pytest.raises(OutsideMemory, match="88 bytes"):
        device.get(address, 11, np.int64)
    with pytest.raises(MemoryError, match="ask Device for more"):
        device.put(np.zeros(4096))
