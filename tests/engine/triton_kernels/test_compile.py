"""The kernels compile for Hopper, within its registers and shared memory. Needs no GPU: Triton has its assembler."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

_SHARED_BYTES = 227 * 1024
"""Maximum of a program on compute capability 9.0."""
_REGISTERS = 65536
_SM_SHARED_BYTES = 228 * 1024
_RESERVED_SHARED_BYTES = 1024
"""Reserved by each program."""
_MAX_SPILLED_BYTES = {"llama-3.1-8b float32": 16}  # by Triton 3.6, in a dtype that only checks are computed in
_TWO_AT_A_TIME = ("llama-3.1-8b float32",)


@pytest.fixture(scope="module")
def usages() -> list[dict[str, Any]]:
    # In another process: this one may have imported triton for the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.triton_kernels.compile_kernels"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    return [json.loads(line) for line in output.stdout.splitlines()]


def test_kernels_of_every_shape_compile_for_hopper(usages: list[dict[str, Any]]) -> None:
    kernels = Counter(usage["kernel"] for usage in usages)
    num_latent = len({usage["shape"] for usage in usages if usage["kernel"] == "_latent_decode_kernel"})
    num_shapes = len({usage["shape"] for usage in usages} - {"any"}) - num_latent
    assert (num_shapes, num_latent) == (8, 2)
    assert kernels == {
        "_rope_kv_write_kernel": 2 * num_shapes,
        "_decode_kernel": num_shapes,
        "_combine_kernel": num_shapes + num_latent,
        "_latent_write_kernel": num_latent,
        "_latent_decode_kernel": num_latent,
        "_latent_chunk_kernel": num_latent,
        "_prefill_kernel": num_shapes,
        "_rms_norm_kernel": 4 * 3,
        "_gate_mul_kernel": 6,
        "_gate_mul_fp8_kernel": 6,
        "_move_blocks": 1,
        "_quantize_rows": 1,
        "_int8_linear": 2,
        "_cut_kernel": 3,
        "_race_kernel": 3,
        "_finish_kernel": 3,
    }


def test_kernels_of_every_shape_spill_no_registers(usages: list[dict[str, Any]]) -> None:
    assert [usage for usage in usages if usage["spilled_bytes"] > _MAX_SPILLED_BYTES.get(usage["shape"], 0)] == []


def test_kernels_of_every_shape_fit_into_shared_memory(usages: list[dict[str, Any]]) -> None:
    assert [usage for usage in usages if usage["shared_bytes"] > _SHARED_BYTES] == []


def test_attention_kernels_use_tensor_cores_and_asynchronous_copies(usages: list[dict[str, Any]]) -> None:
    attention = [usage for usage in usages if re.search("(decode|prefill|chunk)_kernel", usage["kernel"])]
    assert [usage for usage in attention if not (usage["has_tensor_cores"] and usage["has_async_copies"])] == []


def test_copies_wait_until_no_warp_group_reads_what_they_overwrite(usages: list[dict[str, Any]]) -> None:
    assert [usage for usage in usages if usage["refills_without_barrier"]] == []


def test_move_blocks_loads_and_stores_16_bytes_at_once(usages: list[dict[str, Any]]) -> None:
    assert [usage["has_16_byte_copies"] for usage in usages if usage["kernel"] == "_move_blocks"] == [True]


def test_decode_kernels_of_half_precision_run_three_on_a_multiprocessor(usages: list[dict[str, Any]]) -> None:
    decode = [u for u in usages if u["kernel"] == "_decode_kernel" and u["shape"] not in _TWO_AT_A_TIME]
    assert [u for u in decode if 3 * (u["shared_bytes"] + _RESERVED_SHARED_BYTES) > _SM_SHARED_BYTES] == []
    assert [u for u in decode if 3 * u["registers"] * 32 * u["num_warps"] > _REGISTERS] == []


def test_latent_decodes_of_few_heads_run_two_on_a_multiprocessor(usages: list[dict[str, Any]]) -> None:
    (decode,) = (u for u in usages if u["kernel"] == "_latent_decode_kernel" and u["shape"] == "deepseek-v2-lite")
    assert 2 * (decode["shared_bytes"] + _RESERVED_SHARED_BYTES) <= _SM_SHARED_BYTES
    assert 2 * decode["registers"] * 32 * decode["num_warps"] <= _REGISTERS
