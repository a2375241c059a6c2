"""A sample of many parameters: far fewer cases than combinations, in which every value of every parameter occurs."""

import random


def points(count, axes, seed=0):
    """`count` dictionaries, the same in every run; count must be at least the longest axis."""
    assert count >= max(map(len, axes.values()))
    choose = random.Random(seed)
    decks = {name: [values[i % len(values)] for i in range(count)] for name, values in axes.items()}
    for deck in decks.values():
        choose.shuffle(deck)
    return [dict(zip(decks, row, strict=True)) for row in zip(*decks.values(), strict=True)]


def name_of(point):
    """For pytest's list of cases."""
    return "-".join(str(value).removeprefix("torch.") for value in point.values())
