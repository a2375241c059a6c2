"""The samples of parameters hold what they promise."""

import itertools

import grid

AXES = {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": (0.0, 0.5, 1.0, 1.5)}


def test_pairs_cover_all_pairs_with_few_points():
    points = grid.pairs(AXES)
    for first, second in itertools.combinations(AXES, 2):
        assert {(point[first], point[second]) for point in points} == set(itertools.product(AXES[first], AXES[second]))
    assert 12 <= len(points) <= 18
    assert points == grid.pairs(AXES)


def test_points_hold_every_value():
    points = grid.points(7, AXES)
    assert len(points) == 7
    assert all({point[name] for point in points} == set(values) for name, values in AXES.items())
