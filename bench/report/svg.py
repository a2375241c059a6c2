"""Charts as SVG text. Colours are attributes, which every viewer shows; the style sheet replaces them in the dark."""

import math
import textwrap
from html import escape

from .charts import cell

WIDTH, HEIGHT = 860, 320
TITLE, TITLE_LINE, TITLE_LETTERS = 26, 16, 105  # height of a line above the drawing, of more of them; letters of one
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 44
LIGHT = (
    "#d1495b", "#1b7fbd", "#2e8b57", "#e08e0b", "#7d4fb3", "#008b8b",
    "#b5651d", "#5f6b7a", "#a3a500", "#c2569c", "#3d5a98", "#888888",
)  # fmt: skip
DARK = (
    "#ff7b8c", "#5ab4f0", "#63c98b", "#ffb84d", "#b48cf0", "#4fd1d1",
    "#e09a58", "#a3b0c2", "#d8da4a", "#f08bcd", "#8aa6ee", "#c0c0c0",
)  # fmt: skip
ENTRIES = ("ours", "triton", "flash_attn_3", "sdpa_cudnn", "sdpa_flash", "flex", "sdpa_efficient", "megatron_fused",
           "megatron_local", "sdpa_math", "standard", "flash_attn")  # fmt: skip


INK, FAINT, PAPER = ("#1c2430", "#e6eaf0"), ("#d5dbe3", "#38424f"), ("#ffffff", "#12161c")  # light, dark


def variables(dark):
    """For the page around the drawings."""
    return f"--ink:{INK[dark]};--faint:{FAINT[dark]};--paper:{PAPER[dark]};"


STYLE = (
    f":root{{{variables(0)}}}@media(prefers-color-scheme:dark){{:root{{{variables(1)}}}"
    + "".join(f".f{i}{{fill:{c}}}.s{i}{{stroke:{c}}}" for i, c in enumerate(DARK))
    + f".ink{{fill:{INK[1]}}}.roof{{stroke:{INK[1]}}}.grid{{stroke:{FAINT[1]}}}.paper{{fill:{PAPER[1]}}}}}"
)

LABELLED_POINTS = 60


class Axis:
    """Maps a value range to pixels, linear or logarithmic, and chooses its ticks."""

    def __init__(self, low, high, first, last, log):
        self.first, self.last, self.log = first, last, log
        if log:
            low, high = math.log10(low), math.log10(high)
            pad = 0.05 * (high - low) or 0.3
            low, high = low - pad, high + pad
        self.low, self.high = low, high if high > low else low + 1

    def at(self, value):
        value = math.log10(value) if self.log else value
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self):
        if self.log:
            decades = range(math.ceil(self.low), math.floor(self.high) + 1)
            steps = (1,) if len(decades) >= 3 else (1, 2, 5)
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            ticks = [s * 10.0**p for p in powers for s in steps]
            return [t for t in ticks if self.low <= math.log10(t) <= self.high]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
        step = next(s * step for s in (1, 2, 5, 10) if (self.high - self.low) / (s * step) <= 6)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def draw(chart):
    """A complete <svg> element."""
    body, height = {"bars": bars, "lines": lines, "heat": heat, "points": points}[chart.kind](chart)
    keys = [] if chart.kind == "heat" or len(chart.series) == 1 else legend(list(chart.series), height)
    title, heading = escape(chart.title), title_lines(chart)
    above = TITLE + TITLE_LINE * (len(heading) - 1)
    height += above + (18 * math.ceil(len(chart.series) / 5) if keys else 0)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f'<rect x="0" y="0" width="{WIDTH}" height="{height}" fill="{PAPER[0]}" class="paper"/>',
            *(text(LEFT, TITLE - 8 + TITLE_LINE * n, line, "start", size=13) for n, line in enumerate(heading)),
            f'<g transform="translate(0 {above})">',
            *body,
            *keys,
            "</g>",
            "</svg>",
        ]
    )


def title_lines(chart):
    return textwrap.wrap(chart.title, TITLE_LETTERS)


def text(x, y, words, anchor="middle", small=False, turn=None, size=11):
    extra = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    size = 8.5 if small else size
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-family="system-ui, sans-serif" font-size="{size}" '
        f'fill="{INK[0]}" class="ink"{extra}>{escape(str(words))}</text>'
    )


def usual_colour(name):
    """An entry has the same colour in every chart; rungs of the ladder ("06_mma") go through all colours in turn."""
    if name[:2].isdigit() and "_" in name:
        return int(name[:2]) % len(LIGHT)
    return ENTRIES.index(name) if name in ENTRIES else sum(map(ord, name)) % len(LIGHT)


def colours(names):
    """{name: number of its colour}: the usual one, or the next that no name of the chart has, while there are some."""
    found = {}
    for name in sorted(names, key=lambda name: name not in ENTRIES):
        usual = usual_colour(name)
        turns = [(usual + n) % len(LIGHT) for n in range(len(LIGHT))]
        found[name] = next((colour for colour in turns if colour not in found.values()), usual)
    return found


def fill(colour):
    return f'fill="{LIGHT[colour]}" class="f{colour}"'


def stroke(colour):
    return f'stroke="{LIGHT[colour]}" class="s{colour}"'


def legend(names, top):
    keys, colour = [], colours(names)
    for i, name in enumerate(names):
        x, y = LEFT + (i % 5) * 156, top + 4 + i // 5 * 18
        keys.append(f'<rect x="{x}" y="{y}" width="10" height="10" {fill(colour[name])}/>')
        keys.append(text(x + 15, y + 9, name, "start"))
    return keys


def frame(chart, y_axis):
    """Grid lines and labels of the value axis, and the names of both axes."""
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(f'<line class="grid" stroke="{FAINT[0]}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT - 6, y + 4, cell(float(tick)), "end"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.x_label))
    parts.append(text(14, (TOP + HEIGHT - BOTTOM) / 2, chart.y_label, turn=-90))
    return parts


def values_of(chart):
    return [v for values in chart.series.values() for v in values if v is not None]


def bars(chart):
    held = values_of(chart)
    bounds = (min(held) / 2, max(held) * 1.5) if chart.log_y else (0, max(held) * 1.18)
    y_axis = Axis(*bounds, HEIGHT - BOTTOM, TOP, log=chart.log_y)
    parts, colour = frame(chart, y_axis), colours(chart.series)
    slot = (WIDTH - LEFT - RIGHT) / len(chart.x)
    width = min(26, slot * 0.86 / len(chart.series))
    stagger = 11 if max(len(str(label)) for label in chart.x) * 7 > slot else 0  # long labels on two lines in turn
    for column, label in enumerate(chart.x):
        middle = LEFT + slot * (column + 0.5)
        parts.append(text(middle, HEIGHT - BOTTOM + 13 + column % 2 * stagger, label, small=bool(stagger)))
        for i, (name, values) in enumerate(chart.series.items()):
            value = values[column]
            if value is None:
                continue
            x, y = middle + (i - len(chart.series) / 2) * width, y_axis.at(value)
            fade = ' fill-opacity="0.5"' if (name, column) in chart.unsure else ""
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width * 0.9:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
                f"{fill(colour[name])}{fade}><title>{escape(name)}, {label}: {chart.text(name, column)}</title></rect>"
            )
            if width >= 7:
                parts.append(text(x + width / 2 + 3, y - 3, chart.text(name, column), "start", small=True, turn=-90))
    return parts, HEIGHT


def lines(chart):
    held = values_of(chart)
    y_axis = Axis(min(held), max(held), HEIGHT - BOTTOM, TOP, chart.log_y)
    x_axis = Axis(min(chart.x), max(chart.x), LEFT + 20, WIDTH - RIGHT - 20, chart.log_x)
    parts, colour = frame(chart, y_axis), colours(chart.series)
    parts += [text(x_axis.at(x), HEIGHT - BOTTOM + 16, x) for x in chart.x]
    for name, values in chart.series.items():
        places = [(x_axis.at(x), y_axis.at(v), x, v) for x, v in zip(chart.x, values, strict=True) if v is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" {stroke(colour[name])} stroke-width="2"/>')
        parts += [dot(x, y, colour[name], f"{name}: {at}: {cell(v)}") for x, y, at, v in places]
    return parts, HEIGHT


def dot(x, y, colour, words):
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {fill(colour)}><title>{escape(words)}</title></circle>'


def points(chart):
    held = [p for values in chart.series.values() for p in values]
    roof, slope = chart.ceilings["tflops"], chart.ceilings["copy_gbs"] / 1e3
    xs, ys = [x for x, _ in held] + [roof / slope], [y for _, y in held] + [roof]
    x_axis = Axis(min(xs) / 1.5, max(xs) * 1.5, LEFT + 20, WIDTH - RIGHT - 20, log=True)
    y_axis = Axis(min(ys) / 1.5, max(ys) * 1.3, HEIGHT - BOTTOM, TOP, log=True)
    parts, colour = frame(chart, y_axis), colours(chart.series)
    parts += [text(x_axis.at(t), HEIGHT - BOTTOM + 16, cell(float(t))) for t in x_axis.ticks()]
    start = max(10**x_axis.low, 10**y_axis.low / slope)
    knee, end = roof / slope, 10**x_axis.high
    corners = [(start, start * slope), (knee, roof), (end, roof)]
    path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in corners)
    parts.append(f'<polyline class="roof" fill="none" stroke="{INK[0]}" stroke-width="1.5" points="{path}"/>')
    if len(held) <= LABELLED_POINTS:
        parts += point_labels(chart, x_axis, y_axis)
    for name, values in chart.series.items():
        parts += [
            dot(x_axis.at(x), y_axis.at(y), colour[name], f"{name}: {cell(y)} TFLOP/s at {cell(x)}") for x, y in values
        ]
    return parts, HEIGHT


def point_labels(chart, x_axis, y_axis):
    """The name next to every point; names of one column are pushed apart."""
    places = [(x_axis.at(x), y_axis.at(y), name) for name, values in chart.series.items() for x, y in values]
    parts, free = [], {}
    for x, y, name in sorted(places, key=lambda place: -place[1]):
        y = min(y + 3, free.get(round(x), HEIGHT))
        free[round(x)] = y - 9
        parts.append(text(x + 7, y, name, "start", small=True))
    return parts


def heat(chart):
    """A cell is green where ours is faster and red where it is slower; the number says by how much."""
    row_height, label_width = 26, 300
    slot = (WIDTH - label_width - RIGHT) / len(chart.x)
    parts = [text(label_width + slot * (i + 0.5), TOP + 8, x) for i, x in enumerate(chart.x)]
    for r, (name, values) in enumerate(chart.series.items()):
        y = TOP + 16 + r * row_height
        parts.append(text(label_width - 8, y + 17, name, "end"))
        for i, value in enumerate(values):
            if value is None:
                continue
            strength = min(1.0, abs(math.log2(value))) * 0.75 + 0.1
            shade = "#2e8b57" if value >= 1 else "#d1495b"
            parts.append(
                f'<rect x="{label_width + slot * i:.1f}" y="{y}" width="{slot - 2:.1f}" height="{row_height - 2}" '
                f'fill="{shade}" fill-opacity="{strength:.2f}"/>'
            )
            parts.append(text(label_width + slot * (i + 0.5), y + 17, f"{value:.2f}"))
    return parts, TOP + 24 + row_height * len(chart.series)
