"""tools/operand_registers.py: on a text with such a mistake, and on the kernels that hold Q in registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import operand_registers  # noqa: E402

COMMAND = Path(os.environ.get("FLASH_ATTENTION_COMMAND", ROOT / "build" / "release" / "flash-attention"))


def listing(*lines: str) -> str:
    """As nvdisasm prints a function."""
    body = [line if line.startswith(".L") else f"        /*{16 * i:04x}*/    {line} ;" for i, line in enumerate(lines)]
    return "\n.text.kernel:\n" + "\n".join(body) + "\n"


LOAD = "LDSM.16.M88.4 R88, [R2]"
SCORES = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], RZ, !UPT"
PACK = "F2FP.BF16.F32.PACK_AB {}, R25, R24"
OUTPUT = "HGMMA.64x64x16.F32.BF16 R56, {}, gdesc[UR4].tnspB, R56"
AGAIN = "@!P0 BRA `(.L_x_1)"


def test_a_tile_that_is_overwritten_in_a_loop_is_found():
    found = operand_registers.overwritten(
        listing(LOAD, ".L_x_1:", SCORES, PACK.format("R90"), OUTPUT.format("R88"), AGAIN, "EXIT")
    )
    assert found[0] == f"{SCORES}: R90 is written by F2FP, LDSM"


@pytest.mark.parametrize(
    "lines",
    [
        (LOAD, ".L_x_1:", SCORES, PACK.format("R96"), AGAIN, "EXIT"),  # P has its own registers
        (".L_x_1:", LOAD, SCORES, PACK.format("R90"), AGAIN, "EXIT"),  # Q is loaded for each block
        (LOAD, ".L_x_1:", SCORES, AGAIN, PACK.format("R90"), "EXIT"),  # after the loop
    ],
)
def test_other_orders_are_right(lines):
    assert operand_registers.overwritten(listing(*lines)) == []


@pytest.mark.parametrize("head_dim, causal", [(64, True), (64, False), (128, True)])
def test_kernels_that_hold_queries_keep_them(head_dim, causal, tmp_path):
    if operand_registers.nvdisasm() is None:
        pytest.skip("nvdisasm, which Triton brings, is not here")
    flags = ["--batch", "2", "--heads", "2", "--seq-q", "67", "--seq-kv", "131", "--dtype", "bf16"]
    done = subprocess.run(
        [COMMAND, "compile", "--arch", "sm_90", "--head-dim", str(head_dim), *flags, *(["--causal"] if causal else [])],
        env={**os.environ, "FLASH_ATTENTION_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "NVRTC" in done.stderr:
        pytest.skip("NVRTC is not here")
    assert done.returncode == 0, done.stderr
    cubins = list(tmp_path.glob("forward_sm90*.cubin"))
    assert len(cubins) == 1
    assert operand_registers.overwritten_in(cubins[0]) == []
