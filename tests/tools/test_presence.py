"""Whether a problem has an option of scores is asked of Features: src/plan reads a Problem in features.cpp alone."""

import re
from pathlib import Path

PLAN = Path(__file__).resolve().parents[2] / "src" / "plan"
ASKED = re.compile(
    r"\b(?:p|problem)\.(?:softcap|alibi|sink|dropout_p|causal|attention_chunk|left_padding|bias\.present|mask\.present|"
    r"hidden_rows\.bounds|block_mask\.block_q|(?:key_list|bit_mask)\.kind|sequence_windows|window_(?:left|right) *(?:>=|<) *0)(?!\w)"
)


def questions(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if ASKED.search(line)]


def test_the_planner_asks_features():
    found = []
    for file in sorted(PLAN.rglob("*")):
        # tuned.cpp makes one problem stand for many with the same options, and sets them.
        if file.suffix in {".h", ".cpp"} and file.name not in {"features.cpp", "tuned.cpp"}:
            name = file.relative_to(PLAN).as_posix()
            found += [f"{name}: {line}" for line in questions(file.read_text(encoding="utf-8"))]
    assert found == [], "ask request.features"


def test_the_rule_sees_what_it_is_for():
    asked = ["if (p.softcap != 0)", "problem.bias.present &&", "p.window_left >= 0", "p.window_right < 0", "!p.sink", "p.key_list.kind =="]
    assert all(questions(line) for line in asked)
    allowed = ["r.features.softcap", "p.window_left + p.window_right <= 128", "p.window_right > 0", "plan.mask.present"]
    assert not any(questions(line) for line in allowed)
