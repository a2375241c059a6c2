"""Finds registers of wgmma's A operand that the assembler has given to something else as well.

    python tools/operand_registers.py kernel.cubin ...

A tile of Q in registers comes from ldmatrix and is read by the products of a whole loop; P is packed for one product. ptxas
13.0 has put both in the same registers, so that from the second block on Q was the P of the block before. Neither a
compile report nor the emulator sees that. Here each A operand is followed back to the instructions that may have written
it: ldmatrix and something else means that its tile was overwritten. Needs nvdisasm, which Triton brings. No GPU.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

NO_REGISTER = ("ST", "RED", "BAR", "BRA", "EXIT", "R2UR", "WARP", "BS", "CCTL", "MEMBAR", "FENCE", "NOP", "UTM")


class Instruction(NamedTuple):
    text: str  # without its predicate
    conditional: bool
    written: range

    @property
    def operation(self) -> str:
        return self.text.split()[0].split(".")[0]


def nvdisasm() -> str | None:
    """Its path; None if it is not here."""
    found = shutil.which("nvdisasm")
    if found is None:
        places = (Path(place) / "triton/backends/nvidia/bin/nvdisasm" for place in sys.path)
        found = next((str(place) for place in places if place.exists()), None)
    return found


def written_by(text: str) -> range:
    """The registers that an instruction writes."""
    operation = text.split()[0]
    first = re.match(r"\S+\s+(?:U?P\w+,\s*)?R(\d+)\b", text)
    if first is None or operation.startswith(NO_REGISTER):
        return range(0)
    width = 1
    if product := re.match(r"HGMMA\.\d+x(\d+)x", operation):
        width = int(product.group(1)) // 2
    elif operation.startswith("LDSM"):
        width = int(operation[-1]) if operation[-1].isdigit() else 1
    elif ".128" in operation:
        width = 4
    elif ".64" in operation or ".WIDE" in operation:
        width = 2
    return range(int(first.group(1)), int(first.group(1)) + width)


def parse(function: str) -> tuple[list[Instruction], list[list[int]]]:
    """Instructions, and for each those that may come right before it."""
    instructions, labels, jumps = [], {}, []
    for line in function.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label.group(1)] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;", line):
            predicate, text = found.groups()
            target = re.search(r"\.L\w+", text) if text.startswith("BRA") else None
            jumps.append(target.group(0) if target else "")
            conditional = predicate is not None or re.match(r"BRA\S*\s+!?U?P\d", text) is not None
            instructions.append(Instruction(text, conditional, written_by(text)))
    before: list[list[int]] = [[] for _ in instructions]
    for i, (instruction, target) in enumerate(zip(instructions, jumps, strict=True)):
        if target in labels and labels[target] < len(instructions):
            before[labels[target]].append(i)
        ends = instruction.operation in ("BRA", "EXIT", "RET") and not instruction.conditional
        if not ends and i + 1 < len(instructions):
            before[i + 1].append(i)
    return instructions, before


def writers(register: int, reader: int, instructions: list[Instruction], before: list[list[int]]) -> set[str]:
    """The operations whose result the reader may find in the register."""
    found, seen, open_places = set(), set(), list(before[reader])
    while open_places:
        i = open_places.pop()
        if i in seen:
            continue
        seen.add(i)
        if register in instructions[i].written:
            found.add(instructions[i].operation)
            if not instructions[i].conditional:
                continue
        open_places.extend(before[i])
    return found


def overwritten(code: str) -> list[str]:
    """A line for each product in nvdisasm's output whose tile of ldmatrix may have been overwritten."""
    lines = []
    for function in re.split(r"^\.text\.", code, flags=re.MULTILINE)[1:]:
        instructions, before = parse(function)
        for i, instruction in enumerate(instructions):
            operand = re.match(r"HGMMA\S*\s+R\d+,\s*R(\d+),\s*gdesc", instruction.text)
            if operand is None:
                continue
            for register in range(int(operand.group(1)), int(operand.group(1)) + 4):
                found = writers(register, i, instructions, before)
                if "LDSM" in found and len(found) > 1:
                    lines.append(f"{instruction.text}: R{register} is written by {', '.join(sorted(found))}")
                    break
    return lines


def overwritten_in(cubin: Path) -> list[str]:
    program = nvdisasm()
    assert program is not None, "nvdisasm is not here"
    return overwritten(subprocess.run([program, "-c", cubin], capture_output=True, text=True, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubins", nargs="+", type=Path)
    found = {cubin: overwritten_in(cubin) for cubin in parser.parse_args().cubins}
    for cubin, lines in found.items():
        for line in lines:
            print(f"{cubin.name}: {line}")
    bad = sum(bool(lines) for lines in found.values())
    print(f"{len(found)} kernels, {bad} with an operand that is overwritten")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
