"""Mistakes of meaning in src/api: what is refused, what is remembered, what reaches the planner."""

from .plant import Plant

PLANTS = (
    Plant(
        "a sequence may end before it begins",
        "src/api/validate.cpp",
        "    if (length < 0)\n",
        "    if (length < -1)\n",
        "api_test BufferRefusal.PackedLengths",
    ),
)
