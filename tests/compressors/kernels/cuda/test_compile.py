import sys

import pytest

from tests import processes

KERNELS = {
    "_count_digits", "_find_digit", "_count_chosen", "_write_chosen", "_unpack", "_pack_int2", "_unpack_int2",
    "_set_bits", "_join", "_sum", "_sum_magnitudes", "_sum_squares", "_find_largest", "_combine_sums",
    "_combine_largest", "_sum_sides", "_write_pairs", "_write_bits", "_write_rows", "_write_codes", "_write_digits",
    "_decode", "_times", "_transposed_times", "_outer",
}  # fmt: skip


def test_kernels_compile_for_an_h100(tmp_path):
    """The interpreter also runs code that Triton can't compile. Compiling needs no GPU."""
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = processes.run(sys.executable, "-m", "tests.compressors.kernels.cuda.compile_script", env=environment)
    assert script.returncode == 0, script.stdout
    assert set(script.stdout.split()) >= KERNELS
