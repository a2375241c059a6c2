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


def pairs(axes, seed=0):
    """Dictionaries in which every pair of values of two parameters occurs: a covering array, made greedily."""
    choose = random.Random(seed)
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for x, a in enumerate(names) for b in names[x + 1 :]
        for i in range(len(axes[a])) for j in range(len(axes[b]))
    }  # fmt: skip
    found = []
    while missing:
        place = dict(choose.choice(sorted(missing)))
        for name in choose.sample(names, len(names)):
            if name not in place:
                counts = [gain(place, name, i, names, missing) for i in range(len(axes[name]))]
                best = max(counts)
                place[name] = choose.choice([i for i, count in enumerate(counts) if count == best])
        missing -= {((a, place[a]), (b, place[b])) for x, a in enumerate(names) for b in names[x + 1 :]}
        found.append({name: axes[name][place[name]] for name in names})
    return found


def gain(place, name, value, names, missing):
    """How many missing pairs a value adds to those that were chosen."""
    ordered = (((name, value), item) if names.index(name) < names.index(item[0]) else (item, (name, value))
               for item in place.items())  # fmt: skip
    return sum(pair in missing for pair in ordered)


def name_of(point):
    """For pytest's list of cases."""
    return "-".join(str(value).removeprefix("torch.") for value in point.values())
