"""The C ABI as text: every function that c_api.h declares, and every field of its structs with its offset and size.

`tests/install/c_abi.txt` is what the last release promised. A release may add lines; it may not change or lose one
without a new major version. `python tools/c_abi.py --write` records this tree's.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include" / "flash_attention" / "c_api.h"
RECORD = ROOT / "tests" / "install" / "c_abi.txt"


def functions(text: str) -> list[str]:
    return sorted(set(re.findall(r"FLASH_ATTENTION_API[^;]*?\b(flash_attention_\w+)\(", text)))


def fields(text: str) -> list[tuple[str, str]]:
    """(struct, field) in the order of the header."""
    found = []
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.DOTALL):
        for declaration in re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).split(";"):
            for part in declaration.split(","):
                member = re.sub(r"\[\w+\]", "", part).strip()
                if member:
                    found.append((name, re.findall(r"\w+", member)[-1]))
    return found


def constants(text: str) -> list[str]:
    bodies = re.findall(r"enum (?:\w+ )?\{(.*?)\}", text, re.DOTALL)
    return re.findall(r"\b(FLASH_ATTENTION_\w+) =", "\n".join(bodies))


def describe() -> list[str]:
    """The lines of the record; the compiler says where the fields are."""
    text = HEADER.read_text()
    prints = [
        f'printf("field {struct}.{field} %zu %zu\\n", offsetof({struct}, {field}), sizeof((({struct}*)0)->{field}));'
        for struct, field in fields(text)
    ]
    prints += [f'printf("constant {name} %d\\n", (int){name});' for name in constants(text)]
    program = "#include <stdio.h>\n#include <flash_attention/c_api.h>\nint main(void) {\n" + "\n".join(prints) + "\n}\n"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "abi.c", Path(folder) / "abi"
        source.write_text(program)
        subprocess.run(["cc", "-std=c11", f"-I{ROOT / 'include'}", str(source), "-o", str(binary)], check=True)
        lines = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout.splitlines()
    return [f"function {name}" for name in functions(text)] + lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record this tree's ABI")
    if parser.parse_args().write:
        RECORD.write_text("\n".join(describe()) + "\n")
    else:
        print("\n".join(describe()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
