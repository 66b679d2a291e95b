"""`make hip-report`: the page says what the code objects hold."""

import os
from dataclasses import replace

import pytest

from rlk.build.hip import build_hip
from rlk.build.report import COLUMNS, PAGE, compilers, markdown, row, write_report
from rlk.build.resources import hip_resources
from rlk.build.triton_aot import all_variants


@pytest.fixture(scope="module")
def hip_kernels():
    return hip_resources(build_hip().code_objects)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page and the console text, written now."""
    page = tmp_path_factory.mktemp("docs") / "gfx942.md"
    return write_report(page), page.read_text()


def test_the_page_is_current(written):
    if compilers() not in PAGE.read_text() and os.environ.get("CI") != "true":
        pytest.skip(f"docs/gfx942.md describes the code of other compilers than these: {compilers()}")
    assert PAGE.read_text() == written[1], "docs/gfx942.md is stale: run `make hip-report`"


def test_every_kernel_and_configuration_has_a_row(written, hip_kernels):
    text = written[1]
    for variant in all_variants("gfx942"):
        assert f"\n### {variant.kernel}\n" in text and f"\n| {variant.name} " in text
    for kernel in hip_kernels:
        assert f"\n### {kernel.kernel}\n" in text


def test_the_console_shows_the_tables_of_the_page(written):
    console, page = written
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert tables and [line for line in console.splitlines() if line.startswith("|")] == tables


def test_a_row_counts_spills_matrix_instructions_and_loads(hip_kernels):
    kernel = next(each for each in hip_kernels if each.kernel == "support_score")
    instructions = ("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]",
                    "global_load_dwordx4 v[0:3], v[4:5], off", "global_load_ushort v1, v[4:5], off",
                    "buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen", "s_endpgm")
    code = replace(kernel.code, vgprs=100, agprs=4, allocated_vgprs=104, sgprs=32, vgpr_spills=2, sgpr_spills=1,
                   scratch=12, instructions=tuple(enumerate(instructions)))
    changed = replace(kernel, configuration="a", code=code, lds=32768, workgroup=256)
    assert dict(zip(COLUMNS, row(changed), strict=True)) == {
        "configuration": "a", "lanes": "256", "VGPR": "100", "AGPR": "4", "allocated": "104", "SGPR": "32",
        "LDS": "32768", "spills": "3", "scratch": "12", "waves/SIMD": "2",
        "matrix instructions": "1 x v_mfma_f32_16x16x16_bf16", "loads": "2 x 128, 1 x 16"}


def test_a_table_s_columns_are_aligned(hip_kernels):
    lines = [line for line in markdown(hip_kernels[:1]).splitlines() if line.startswith("|")]
    assert len(lines) == 3 and len({tuple(i for i, mark in enumerate(line) if mark == "|") for line in lines}) == 1
