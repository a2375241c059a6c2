"""The man page and the completions, as man and bash see them."""

import re
import shutil
import subprocess

import pytest


def complete(script: str, line: str) -> list[str]:
    """What bash offers at the end of the line."""
    words = line.split(" ")
    program = f"{script}\nCOMP_WORDS=({' '.join(map(repr, words))})\nCOMP_CWORD={len(words) - 1}\n"
    program += '_flash_attention\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_verbs_flags_and_values(command):
    script = command("generate", "bash").stdout
    assert {"run", "doctor", "generate"} <= set(complete(script, "flash-attention "))
    assert complete(script, "flash-attention doc") == ["doctor"]
    assert complete(script, "flash-attention run --head-d") == ["--head-dim", "--head-dim-v"]
    assert complete(script, "flash-attention run --dtype b") == ["bfloat16"]
    assert "--head-dim" not in complete(script, "flash-attention cache ")
    assert "#compdef flash-attention" in command("generate", "zsh").stdout


@pytest.mark.skipif(not shutil.which("groff"), reason="no groff here")
def test_the_man_page_has_no_mistake_of_troff(command):
    page = command("generate", "man").stdout
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=page, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    text = subprocess.run(["groff", "-man", "-Tascii", "-P-c"], input=page, capture_output=True, text=True).stdout
    text = re.sub(".\x08", "", text)  # bold is a letter struck twice
    for words in ("--head-dim N", "flash-attention compile --common", "EXIT STATUS", "sm_90"):
        assert words in text


def test_what_cannot_be_generated_is_named(command):
    assert "got 'fish', allowed: man, bash, zsh" in command("generate", "fish", code=2).stderr
