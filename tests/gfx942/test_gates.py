"""The gates: each catches what it is there for, and names kernel, gate and both values."""

import re
from dataclasses import replace

import pytest

from rlk.build.code_object import Kernel
from rlk.build.gates import Failure, Gates, GateTable, check_all, check_kernel, hip_gates, read_gates, require
from rlk.build.hip import build_hip
from rlk.build.options import check_options
from rlk.build.resources import Resources, hip_resources, occupancy
from rlk.build.triton_aot import all_variants, compile_variant
from rlk.build.triton_build import check_triton, resources_of
from rlk.errors import CheckFailed, UsageError
from rlk.kernels import attention, gemm

ROOMY = GateTable(Gates(max_vgprs=512, max_lds=65536), {})


def variant_of(module, **wanted):
    """The first gfx942 variant of `module` whose kernel, constants and options are those."""
    return next(each for each in module.variants("gfx942")
                if wanted.items() <= ({"kernel": each.kernel} | each.constants | each.options).items())


def named(failures, gate):
    """The failures of one gate as text; there is at least one."""
    found = [str(failure) for failure in failures if failure.gate == gate]
    assert found, f"no failure of gate {gate} in {[str(failure) for failure in failures]}"
    return found


def code(*instructions, **changed):
    """A kernel of these instructions that passes every other gate."""
    made = Kernel(name="sample", arguments=(), kernarg_size=0, lds=0, scratch=0, vgprs=32, allocated_vgprs=32,
                  agprs=0, sgprs=16, vgpr_spills=0, sgpr_spills=0, max_workgroup=256, wave_size=64, user_sgprs=2,
                  preload_length=0, properties=0, workgroup_ids=(True, False, False), packed_lanes=0,
                  float_mode=0xF0, ieee_clamped=True, instructions=tuple(enumerate(instructions)))
    made = replace(made, **changed)
    return Resources("sample", "", made, made.lds, made.max_workgroup)


def checked(kernel, **gates):
    return [(each.gate, each.got, each.expected)
            for each in check_kernel(kernel, GateTable(Gates(**{"max_vgprs": 128, "max_lds": 1024} | gates), {}))]


def test_a_128_row_attention_tile_with_two_warps_spills_and_fails():
    tile = variant_of(attention, BLOCK_M=64)
    broken = replace(tile, name="prefill_128x64_w2", constants=tile.constants | {"BLOCK_M": 128},
                     options=tile.options | {"num_warps": 2})
    text = named(check_triton([broken]), "vgpr_spills")[0]
    assert re.fullmatch(rf"kernel {tile.kernel}, configuration prefill_128x64_w2, gate vgpr_spills: got [1-9]\d*, "
                        "expected 0", text)


def test_a_gemm_without_matrix_instr_nonkdim_fails_with_both_instructions():
    tile = variant_of(gemm, kernel="gemm", BLOCK_M=64)
    broken = replace(tile, name="default_nonkdim", options={
        name: value for name, value in tile.options.items() if name != "matrix_instr_nonkdim"})
    failures = check_triton([broken])
    assert ("kernel gemm, configuration default_nonkdim, gate matrix: got v_mfma_f32_32x32x8_bf16, expected "
            "v_mfma_f32_16x16x16_bf16") in named(failures, "matrix")
    assert named(failures, "forbidden matrix")


@pytest.mark.parametrize("options, gate, got, expected", [
    ({"no_such_option": 1}, "option no_such_option", "no such option", "1"),
    ({"schedule_hint": "bogus"}, "option schedule_hint", "the same machine code with 'bogus' and without it",
     "a difference"),
    ({"enable_fp_fusion": True}, "option enable_fp_fusion", "True", "False"),
])
def test_an_option_that_the_compiler_ignores_or_that_breaks_the_contract_fails(options, gate, got, expected):
    tile = variant_of(gemm, kernel="gemm", BLOCK_M=64)
    broken = replace(tile, name="with_option", options=tile.options | options)
    text = named(check_options([broken], "gfx942"), gate)[0]
    assert text.startswith(f"kernel gemm, configuration with_option, gate {gate}: got {got}, expected {expected}")


def test_options_that_take_effect_pass():
    assert check_options([variant_of(gemm, kernel="gemm", BLOCK_M=64)], "gfx942") == []


def test_a_hip_kernel_over_a_tightened_ceiling_fails_with_both_values():
    kernels = hip_resources(build_hip().code_objects)
    assert check_all(kernels, hip_gates()) == []
    tables = hip_gates()
    tables["support_score"] = GateTable(replace(tables["support_score"].common, max_vgprs=7), {})
    vgprs = next(kernel.code.vgprs for kernel in kernels if kernel.kernel == "support_score")
    with pytest.raises(CheckFailed, match=f"kernel support_score, gate max_vgprs: got {vgprs}, expected at most 7"):
        require(check_all(kernels, tables))


def test_a_kernel_without_gates_and_gates_without_a_kernel_fail():
    failures = check_all([code()], {"gone": ROOMY, "sample": replace(ROOMY, configurations={"old": ROOMY.common})})
    assert {(each.kernel, each.configuration, each.gate) for each in failures} == {
        ("gone", "", "section"), ("sample", "old", "section")}
    assert "expected a table [sample]" in str(check_all([code()], {})[0])


@pytest.mark.parametrize("changed, gate, got", [
    ({"vgpr_spills": 3}, "vgpr_spills", 3), ({"sgpr_spills": 2}, "sgpr_spills", 2),
    ({"scratch": 16}, "scratch", "16 bytes"), ({"vgprs": 129}, "max_vgprs", 129), ({"lds": 1025}, "max_lds", 1025),
])
def test_spills_scratch_and_ceilings(changed, gate, got):
    assert checked(code()) == []
    assert [(name, value) for name, value, _ in checked(code(**changed))] == [(gate, got)]


def test_matrix_instructions_are_exactly_the_one_named():
    right, other = "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]", "v_mfma_f32_16x16x4_f32 v[0:3], v1, v2, 0"
    name = right.split()[0]
    assert checked(code(right), matrix=name) == []
    assert checked(code(), matrix=name) == [("matrix", "none", name)]
    assert checked(code(right)) == [("matrix", name, "none")]
    assert checked(code(right, other), matrix=name) == [("matrix", f"{name}, {other.split()[0]}", name)]


def test_the_widest_load_is_the_one_named():
    wide, narrow = "global_load_dwordx4 v[0:3], v[4:5], off", "buffer_load_ushort v1, v2, s[0:3], 0 offen"
    assert checked(code(wide, narrow), load_bits=128) == []
    assert checked(code(narrow), load_bits=128) == [("load_bits", 16, 128)]
    assert checked(code(wide), load_bits=64) == [("load_bits", 128, 64)]
    assert checked(code(wide, narrow), load_bits=128, narrow_loads=1) == []
    assert checked(code(wide, narrow), load_bits=128, narrow_loads=0) == [("narrow_loads", 1, "at most 0")]
    assert checked(code("s_load_dwordx4 s[0:3], s[0:1], 0x0"), load_bits=32) == [("load_bits", 0, 32)]


SYSTEM_SCOPE = ["global_load_dword v1, v0, s[0:1] sc0 sc1", "buffer_inv sc0 sc1", "buffer_wbl2 sc0 sc1",
                "global_store_dword v0, v1, s[2:3] sc0 sc1", "global_load_dwordx4 v[0:3], v[4:5], off"]


def test_system_scope_wants_both_bits_and_both_fences():
    assert checked(code(*SYSTEM_SCOPE), system_scope=True) == []
    for at in range(4):
        weak = [text.replace(" sc0", "") if at == i else text for i, text in enumerate(SYSTEM_SCOPE)]
        assert ("system_scope", weak[at], "sc0 sc1") in checked(code(*weak), system_scope=True)
        without = SYSTEM_SCOPE[:at] + SYSTEM_SCOPE[at + 1:]
        assert [name for name, _, _ in checked(code(*without), system_scope=True)] == ["system_scope"]


def test_an_atomic_of_system_scope_has_sc1():
    assert checked(code(*SYSTEM_SCOPE, "global_atomic_add v0, v1, s[2:3] sc1"), system_scope=True) == []
    old = "global_atomic_add v2, v0, v1, s[2:3] sc0"
    assert checked(code(*SYSTEM_SCOPE, old), system_scope=True) == [("system_scope", old, "sc1 on an atomic")]


@pytest.mark.parametrize("text, message", [
    ("[k]\nmax_vgprs = 8\n", "max_lds missing"), ("[k]\nmax_vgprs = 8\nmax_lds = 0\nmax_vgrps = 9\n", "max_vgrps = 9"),
    ("[k]\nmax_vgprs = '8'\nmax_lds = 0\n", "max_vgprs = '8', expected one of max_vgprs"),
    ("max_vgprs = 8\n", "one table per kernel"), ("[k\n", "at line 1"),
])
def test_a_gate_file_that_is_not_understood_is_named_with_the_key(tmp_path, text, message):
    path = tmp_path / "sample.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(str(path))) as raised:
        read_gates([path])
    assert message in str(raised.value)


def test_a_configuration_inherits_what_it_does_not_override(tmp_path):
    path = tmp_path / "sample.toml"
    path.write_text("[k]\nmax_vgprs = 8\nmax_lds = 4\n[k.'float, 2']\nmax_vgprs = 9\n")
    table = read_gates([path])["k"]
    assert (table.of("float, 2"), table.of("other")) == (Gates(9, 4), Gates(8, 4))


def test_a_kernel_has_one_section_in_all_files(tmp_path):
    paths = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for path in paths:
        path.write_text("[k]\nmax_vgprs = 8\nmax_lds = 4\n")
    with pytest.raises(UsageError, match="b.toml: expected one table per kernel, got 'k' again"):
        read_gates(paths)


def test_a_failure_names_kernel_configuration_gate_got_and_expected():
    assert str(Failure("gemm", "w4", "max_vgprs", 130, "at most 128")) == (
        "kernel gemm, configuration w4, gate max_vgprs: got 130, expected at most 128")


@pytest.mark.parametrize("allocated_vgprs, sgprs, lds, workgroup, waves", [
    (64, 30, 0, 256, 8), (72, 30, 0, 256, 7), (128, 30, 0, 256, 4), (136, 30, 0, 256, 3), (512, 30, 0, 256, 1),
    (64, 106, 0, 64, 7), (32, 30, 32768, 256, 2), (32, 30, 65536, 128, 0.5), (32, 30, 0, 64, 8), (32, 30, 0, 1024, 8),
    (128, 30, 0, 1024, 4), (168, 30, 0, 1024, 0), (200, 30, 0, 512, 2),
])
def test_occupancy_is_the_smallest_of_registers_lds_and_whole_workgroups(allocated_vgprs, sgprs, lds, workgroup, waves):
    assert occupancy(allocated_vgprs, sgprs, lds, workgroup) == waves


def test_occupancy_agrees_with_the_compiler_s_own():
    """LLVM writes what the registers allow, not knowing of the LDS that Triton's launch adds."""
    seen = set()
    for variant in all_variants("gfx942")[::3]:
        kernel = resources_of(variant)
        written = re.search(r"^; Occupancy: (\d+)", compile_variant(variant, "gfx942").asm, re.M)
        assert occupancy(kernel.code.allocated_vgprs, kernel.code.sgprs, 0, 64) == int(written[1]), variant.label
        seen.add(written[1])
    assert len(seen) > 1
