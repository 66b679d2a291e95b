"""A product that starts before the kernel in front of it has ended: it only asks for its weights before it waits."""

import dataclasses

import pytest

from rlk.build.options import check_options
from rlk.build.triton_aot import compile_variant
from rlk.kernels import gemm
from rlk.kernels.gemm import AFTER, Config

ARCH = "sm_90"
PLAIN = next(v for v in gemm.variants(ARCH) if v.name == "decode_16x32_w4_bf16")


def early(swap, ahead, epilogue="round"):
    config = Config(8 if swap else 16, 32, 128, 4, 4, swap=swap, ahead=ahead)
    return dataclasses.replace(PLAIN, name=f"early_{swap}_{ahead}_{epilogue}", options=config.options(ARCH),
                               constants=gemm.constants(config, ARCH, 1, epilogue))


@pytest.mark.parametrize("epilogue", ["round", "residual", "swiglu"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("ahead", [0, 512])
def test_nothing_is_read_or_written_before_the_wait_but_prefetches_into_l2(swap, ahead, epilogue):
    variant = early(swap, ahead, epilogue)
    assert check_options([variant], ARCH) == []
    before, after = compile_variant(variant, ARCH).asm.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before and ("prefetch.global.L2" in before) == bool(ahead)
    assert not any(access in before for access in ("ld.global", "cp.async", "st.global"))
    assert all(access in after for access in ("cp.async", "st.global"))


def test_a_configuration_that_starts_after_the_kernel_in_front_has_none_of_this():
    assert Config(16, 32, 128, 4, 4).ahead == AFTER and "launch_pdl" not in PLAIN.options
    assert "griddepcontrol" not in compile_variant(PLAIN, ARCH).asm


def test_no_more_of_a_weight_row_is_asked_for_ahead_than_it_has():
    config = Config(16, 32, 128, 4, 4, leaves=(1, 2), ahead=512)
    assert config.fits(8, 4096, 512, 1) and config.fits(8, 4096, 256, 2)
    assert not config.fits(8, 4096, 384, 1) and not config.fits(8, 4096, 128, 2)


def test_the_dispatch_has_no_configuration_that_swaps_or_starts_early():
    assert {(c.swap, c.ahead) for configs in gemm.CONFIGS.values() for c in configs.values()} == {(False, AFTER)}


def test_an_early_start_without_a_wait_fails_its_gate():
    broken = dataclasses.replace(PLAIN, name="no_wait", options=PLAIN.options | {"launch_pdl": True})
    (failure,) = check_options([broken], ARCH)
    assert str(failure) == ("kernel gemm, configuration no_wait, gate option launch_pdl: got no griddepcontrol.wait, "
                            "expected griddepcontrol.wait in the code")
