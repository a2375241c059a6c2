"""Names follow docs/glossary.md: one word per mechanism. Words that were retired do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("include", "src", "kernels", "cli", "python", "bench", "tools")
SOURCES = {".cpp", ".cu", ".cuh", ".h", ".py"}

# A name that was private to this project, and the field's.
RETIRED = {
    "much_shared": "prefer_shared_carveout",
    "begins_early": "programmatic_launch",
    "made_words": "precomputed_mask_bits",
    "step_words": "mask_bits",
    "heads_in_turn": "interleave_heads",
    "await_launch_before": "griddepcontrol_wait",
    "let_next_launch_begin": "griddepcontrol_launch_dependents",
    "registers_fresh": "hide_from_compiler",
    "K_free": "K_empty",
    "Q_free": "Q_empty",
    "take_turn": "pingpong_wait",
    "pass_turn": "pingpong_signal",
    "take_turns": "dynamic_scheduler",
    "await_turn": "wait_for_order",
    "Redo": "RetryList",
    "pass_over": "skip_blocks",
    "may_pass": "may_skip",
    "Walk": "WorkTile",
    "walk": "loop",
    "walk_step": "run_step",
    "walk_pairs": "run_step_pairs",
    "load_walks": "produce_work_tiles",
    "parts_of_group": "num_gqa_splits",
    "lean": "serial_dP",
    "blind": "sees_no_key",
    "tight": "low_registers",
    "uneven": "imbalanced, or has_edges",
    "foreign_rows": "next_sequence_rows",
    "bad_lanes": "nonfinite_lanes",
    "doubts": "nonfinite_flags",
    "clean_keys": "zero_nonfinite_keys",
    "careful": "repairs_rows, or nonfinite_safe",
    "careful_dot": "warp_dot",
    "Finisher": "Epilogue",
    "Sweep": "KvLoop",
    "ask_for_keys": "prefetch_keys",
    "come_from_memory": "exceeds_cache",
    "cpu_near_bytes": "cache_resident_bytes",
    "bend": "derivative, or modify",
    "bend_scores": "modify_scores",
    "weigh": "exponentiate",
    "weigh_tile": "exponentiate_tile",
    "drop_some": "apply_dropout",
    "shrink": "rescale",
    "correction": "rescale",
    "lift": "P_scale",
    "hand_over": "publish_tile, or send_dS",
    "stand_by": "arrive_without_part",
    "turned": "rotated",
    "dead_lock": "deadlock",
    "nap": "starvation",
}


def words_of(text: str, suffix: str) -> set[str]:
    """Identifiers of a program: comments and strings are prose."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", text) if suffix == ".py" else text
    text = re.sub(r"#.*" if suffix == ".py" else r"//.*", "", text)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', "", text)
    return set(re.findall(r"[A-Za-z_]\w*", text))


@pytest.mark.parametrize("room", ROOMS)
def test_no_retired_name_comes_back(room):
    found = {}
    for path in sorted((ROOT / room).rglob("*")):
        if path.suffix in SOURCES:
            retired = words_of(path.read_text(encoding="utf-8"), path.suffix) & RETIRED.keys()
            found.update({f"{path.relative_to(ROOT)}: {word}": RETIRED[word] for word in retired})
    assert found == {}


def test_the_rule_sees_names_alone():
    text = 'int careful = f("walk");  // no shrink\n'
    assert words_of(text, ".cpp") & RETIRED.keys() == {"careful"}
