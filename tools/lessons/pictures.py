"""The pictures of the lessons, each from what the kernels' own code says: {name: SVG}."""

import subprocess
import sys
from html import escape
from pathlib import Path

from .recording import ROOT, compile_host, folder, record
from .replay import Replay

sys.path.insert(0, str(ROOT / "bench"))
from report.svg import FAINT, INK, LIGHT, PAPER, STYLE

WIDTH, MARGIN = 860, 16
COLOURS = {"K": 1, "V": 2, "Q": 3, "S": 1, "O": 2, "softmax": 0, "busy": 7}


class Drawing:
    """Boxes and words; colours are attributes, which every viewer shows, and a style sheet replaces them in the dark."""

    def __init__(self, title, height):
        self.title, self.height, self.parts = title, height, []

    def box(self, x, y, width, height, colour=None, label="", size=11, faint=False, bold=False):
        """`colour` is one of the charts'; without one only the edge is drawn."""
        inside = 'fill="none"' if colour is None else f'fill="{LIGHT[colour]}" class="f{colour}"'
        opacity = ' fill-opacity="0.25"' if faint else ""
        edge = f'stroke="{INK[0] if bold else FAINT[0]}" class="{"roof" if bold else "grid"}"'
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f"<rect {place} {inside}{opacity}/>")
        self.parts.append(f'<rect {place} fill="none" {edge} stroke-width="{1.5 if bold else 0.8}"/>')
        if label != "":
            on_colour = colour is not None and not faint
            self.text(x + width / 2, y + height / 2 + size * 0.36, label, "middle", size, on_colour=on_colour)

    def text(self, x, y, words, anchor="start", size=11, on_colour=False):
        ink = f'fill="{PAPER[0]}" class="on"' if on_colour else f'fill="{INK[0]}" class="ink"'
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-family="system-ui, sans-serif" '
            f'font-size="{size}" {ink}>{escape(str(words))}</text>'
        )

    def svg(self):
        title = escape(self.title)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{title}">'
        )
        dark = f"@media(prefers-color-scheme:dark){{.on{{fill:{PAPER[1]}}}}}"
        paper = f'<rect x="0" y="0" width="{WIDTH}" height="{self.height}" fill="{PAPER[0]}" class="paper"/>'
        lines = [head, f"<style>{STYLE}{dark}</style>", f"<title>{title}</title>", paper, *self.parts, "</svg>"]
        return "\n".join(lines) + "\n"


def answers(source):
    """The lines that a program of this folder prints, as words."""
    program = Path(folder().name) / source
    compile_host(Path(__file__).with_name(f"{source}.cpp"), program)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return [[int(word) if word.isdigit() else word for word in line.split()] for line in lines]


# -- the primer ------------------------------------------------------------------------------------------------------------


def sectors(command):
    """A warp's request: the elements of a matrix, eight floats a sector."""
    places = {}
    for name, lane, row, column in answers("sectors"):
        places.setdefault(name, {})[row, column] = lane
    rows, columns, size = 32, 40, 9
    drawing = Drawing("One request of a warp: which sectors of 32 bytes it touches", 362)
    drawing.text(MARGIN, 22, drawing.title, size=13)
    for panel, (name, lanes) in enumerate(places.items()):
        left, top = MARGIN + panel * 424, 58
        touched = {(row, column // 8) for row, column in lanes}
        drawing.text(
            left, 44, f"{name}: {len(touched)} sectors, {100 * 4 * len(lanes) / (32 * len(touched)):.1f} % of them used"
        )
        for row in range(rows):
            for sector in range(columns // 8):
                inside = (row, sector) in touched
                drawing.box(left + sector * 8 * size, top + row * size, 8 * size, size, 3 if inside else None, faint=True)
        for (row, column), lane in lanes.items():
            if column < columns:
                drawing.box(left + column * size, top + row * size, size, size, 1, lane if lane < 10 else "", size=7)
    return drawing.svg()


# -- the ladder: layouts ---------------------------------------------------------------------------------------------------


def bank_panel(drawing, left, top, title, rows, size=38):
    """`rows`: of each row [(place of 16 bytes in the 128 of a wavefront, label, whether it is read)]."""
    drawing.text(left, top - 24, title, size=12)
    drawing.text(left + 38, top - 6, "banks", "end", 9)
    for place in range(8):
        drawing.text(left + 44 + (place + 0.5) * size, top - 6, f"{4 * place}-{4 * place + 3}", "middle", 9)
    for index, chunks in enumerate(rows):
        y = top + index * 22
        drawing.text(left + 38, y + 15, f"row {index}", "end", 10)
        for place in range(8):
            drawing.box(left + 44 + place * size, y, size, 22)
        for place, label, read in chunks:
            drawing.box(left + 44 + place * size, y, size, 22, 0 if read else 1, label, faint=not read)
    return top + 22 * len(rows)


def passes(rows):
    """How often the banks are gone through for what is read: the most that one place has to give."""
    read = [place for chunks in rows for place, _, is_read in chunks if is_read]
    return max(map(read.count, read))


def row_tile(command):
    """Rung 03: who computes which score, and from which banks eight lanes read their keys."""
    recorder = record(command, "03_row_tile", 32)
    steps = recorder.steps(*range(recorder.threads))
    scores = {}
    for thread, its in steps.items():
        for step in its:
            if step[0] == "store_shared" and step[2] == 4:
                scores[step[1]] = thread
    first = min(scores)
    drawing = Drawing("03_row_tile: a block's tile of scores, and how its keys are read", 520)
    drawing.text(MARGIN, 22, drawing.title, size=13)
    drawing.text(MARGIN, 46, "16 queries x 32 keys: colours are warps, numbers are lanes", size=12)
    for address, thread in scores.items():
        row, column = divmod((address - first) // 4, 32)
        drawing.box(MARGIN + 44 + column * 24, 58 + row * 13, 24, 13, thread // 32, thread % 32, size=8, faint=True)
    for row in range(0, 16, 4):
        drawing.text(MARGIN + 38, 58 + row * 13 + 30, f"warp {row // 4}", "end", 10)

    def first_key(its):
        """The first 16 bytes read after the tile has come: of the lane's key."""
        barriers = [at for at, step in enumerate(its) if step[0] == "barrier"]
        return next(step[1] for step in its[barriers[1] :] if step[0] == "load_shared" and step[2] == 16)

    keys = [first_key(steps[lane]) for lane in range(8)]
    start = keys[0] - keys[0] % 128
    pitch = keys[1] - keys[0]
    rows = [[(address % 128 // 16, f"K[{row}]", True)] for row, address in enumerate(keys)]
    unpadded = [[((start + row * (pitch - 16)) % 128 // 16, f"K[{row}]", True)] for row in range(8)]
    titles = (
        (unpadded, f"rows {pitch - 16} bytes apart: {passes(unpadded)} passes"),
        (rows, f"rows {pitch} bytes apart: {passes(rows)} pass"),
    )
    for panel, (its, title) in enumerate(titles):
        bank_panel(drawing, MARGIN + panel * 424, 330, f"eight lanes read 16 bytes each; {title}", its)
    return drawing.svg()


def fragments(command):
    """Rungs 05a and 06: whose the elements of S are, and what becomes of them."""
    lines = answers("layouts")
    accumulator = {(row, column): (lane, e) for kind, lane, e, row, column in (a for a in lines if a[0] == "accumulator")}
    operand = [(register, element) for kind, register, element in (a for a in lines if a[0] == "operand")]
    shown = 5
    drawing = Drawing("mma.sync: two accumulators of 16 x 8, and the lane that holds each element", 440)
    drawing.text(MARGIN, 22, drawing.title, size=13)
    for (row, column), (lane, e) in accumulator.items():
        mine = lane == shown
        x, y = MARGIN + 44 + column * 28 + column // 8 * 10, 58 + row * 20
        drawing.box(
            x, y, 28, 20, 0 if mine else lane % 4 + 1, f"c{e}" if mine else lane, size=10, faint=not mine, bold=mine
        )
    for row in (0, 7, 8, 15):
        drawing.text(MARGIN + 38, 58 + row * 20 + 14, f"row {row}", "end", 10)
    for block in range(2):
        drawing.text(MARGIN + 44 + block * 234 + 112, 50, f"keys {8 * block} to {8 * block + 7} of S", "middle", 10)
    left = 540
    drawing.text(left, 76, f"lane {shown} has c0 to c7, in rows {shown // 4} and {shown // 4 + 8}:", size=12)
    for e in range(8):
        drawing.box(left + e * 38, 90, 38, 24, 0, f"c{e}", bold=True)
    drawing.text(left, 146, "rounded and packed in pairs they are", size=12)
    for place, (register, e) in enumerate(operand):
        drawing.box(left + place * 38, 190, 38, 24, 0, f"c{e}", faint=True)
        if place % 2 == 0:
            drawing.box(left + place * 38, 164, 76, 24, 3, f"A[{register}]")
    drawing.text(left, 240, "its part of the A operand of P V:", size=12)
    drawing.text(left, 258, "S becomes P without leaving the registers.", size=12)
    drawing.text(MARGIN, 404, "The four lanes of a row hold all of it: a maximum of the row is two shuffles.", size=12)
    drawing.text(
        MARGIN,
        424,
        "Colours: lane mod 4, which says the columns. Lane / 4 says the row; c2, c3, c6 and c7 are eight rows further on.",
        size=12,
    )
    return drawing.svg()


def swizzle(command):
    """Rungs 06 and 07: from which banks ldmatrix reads the same chunk of eight rows."""
    chunks = [its[1:] for its in answers("layouts") if its[0] == "chunk"]
    drawing = Drawing("ldmatrix reads chunk 2 of eight rows of K: from which banks?", 262)
    drawing.text(MARGIN, 22, drawing.title, size=13)
    for panel, name in enumerate(("06_mma: rows as they are", "07_swizzle: chunks permuted by the row")):
        rows = [[] for _ in range(8)]
        for row, chunk, *offsets in chunks:
            rows[row].append((offsets[panel] % 128 // 16, chunk, chunk == 2))
        times = passes(rows)
        title = f"{name}; {times} pass{'es' * (times > 1)}"
        bank_panel(drawing, MARGIN + panel * 424, 68, title, rows)
    return drawing.svg()


def causal_tiles(command):
    """Rung 10: which tiles are touched, and which need a mask."""
    tiles = [its[1:] for its in answers("layouts") if its[0] == "tile"]
    drawing = Drawing("10_causal: 512 queries x 512 keys in tiles of 64 x 64", 330)
    drawing.text(MARGIN, 22, drawing.title, size=13)
    colours = {"whole": 2, "masked": 3}
    for q, k, kind in tiles:
        drawing.box(
            MARGIN + 100 + k * 44, 44 + q * 32, 44, 32, colours.get(kind), {"whole": "", "masked": "mask"}.get(kind, "")
        )
    for q in range(8):
        drawing.text(MARGIN + 94, 44 + q * 32 + 20, f"queries {64 * q} ...", "end", 10)
    count = {kind: sum(tile[2] == kind for tile in tiles) for kind in ("whole", "masked", "skipped")}
    words = {
        "whole": "multiplied, no score is tested",
        "masked": "multiplied, each score is tested",
        "skipped": "never loaded",
    }
    for line, (kind, its) in enumerate(words.items()):
        drawing.box(510, 60 + line * 34, 30, 22, colours.get(kind))
        drawing.text(550, 76 + line * 34, f"{count[kind]} tiles {its}", size=12)
    return drawing.svg()


def persistent(command):
    """Rung 16: which block takes which tile of queries, and when."""
    sms, sequence, heads = 4, 1024, 2
    recorder = record(command, "16_persistent", sequence, heads, causal=True)
    drawing = Drawing(f"16_persistent, causal: {sms} SMs, {heads} heads of {sequence // 128} tiles of 128 queries", 204)
    drawing.text(MARGIN, 22, drawing.title, size=13)
    unit = (WIDTH - 2 * MARGIN - 60) / 18
    for sm in range(sms):
        at, tiles = 0, []
        for step in recorder.steps(0, block=sm, grid=sms)[0]:
            if step[0] == "bulk_load" and step[1] == 0 and step[4] == 0 and step[5] % 128 == 0:
                tiles.append([step[6], step[5] // 128, 0])
            if step[0] == "bulk_load" and step[1] == 1 and step[4] == 0:
                tiles[-1][2] += 1
        for head, tile, blocks in tiles:
            x = MARGIN + 60 + at * unit
            drawing.box(x, 40 + sm * 32, blocks * unit, 26, head + 1, f"tile {tile}" if blocks > 1 else tile)
            at += blocks
        drawing.text(MARGIN + 52, 40 + sm * 32 + 17, f"SM {sm}", "end", 11)
    drawing.text(
        MARGIN + 60,
        188,
        "A width is the keys that a tile sees; colours are heads. A long tile, then a short one: all SMs do the same.",
        size=11,
    )
    return drawing.svg()


# -- the ladder: pipelines -------------------------------------------------------------------------------------------------

# Of each rung: keys, threads that are recorded and how many each stands for, copies of a thread that make a tile of 64.
PIPELINES = {
    "08_q_registers": (256, {0: 128}, 8),
    "09_async": (256, {0: 128}, 8),
    "12_wgmma": (512, {0: 128, 128: 128}, 1),
    "13_warp_specialised": (512, {0: 32, 128: 128, 256: 128}, 1),
    "14_overlap": (512, {0: 32, 128: 128, 256: 128}, 1),
    "16_persistent": (512, {0: 32, 128: 128, 256: 128}, 1),
}


def timeline(command, rung):
    sequence, weights, copied_tile = PIPELINES[rung]
    recorder = record(command, rung, sequence)
    grid = 2 if rung.startswith("16") else 1
    boxes = Replay(recorder.steps(*weights, grid=grid), weights, copied_tile).run()
    actors = sorted({box.actor for box in boxes if box.row == "products"})
    many = len(actors) > 1
    rows = [("copies", None, "copies")]
    for number, actor in enumerate(actors, 1):
        whose = f" of group {number}" if many else ""
        rows += [("products", actor, f"products{whose}"), ("softmax", actor, f"softmax{whose}")]
    if any(box.row == "stores" for box in boxes):
        rows.append(("stores", None, "stores"))
    end = max(box.end for box in boxes if box.row in ("products", "softmax", "stores"))
    left, row_height, top = 140, 24, 44
    unit = (WIDTH - MARGIN - left) / 44  # one scale for rungs that are compared
    height = top + row_height * (len(rows) + 1) + 34
    keys = sequence // (64 if copied_tile > 1 else 128)
    queries = "two tiles of queries, for each" if grid > 1 else "a tile of queries,"
    drawing = Drawing(f"{rung}: {queries} {keys} tiles of keys", height)
    drawing.text(MARGIN, 22, drawing.title, size=13)
    for index, (row, actor, label) in enumerate(rows):
        y = top + index * row_height
        drawing.text(left - 8, y + 15, label, "end")
        for box in boxes:
            if box.row != row or (actor is not None and box.actor != actor) or box.begin >= end:
                continue
            name = {"softmax": str(box.number), "stores": box.what}.get(box.row, f"{box.what}{box.number}")
            width = min(box.end, end) - box.begin
            drawing.box(left + box.begin * unit, y + 2, width * unit, row_height - 5, COLOURS[box.what], name, size=9)
    y = top + len(rows) * row_height
    drawing.text(left - 8, y + 15, "tensor cores", "end")
    drawing.box(left, y + 2, end * unit, row_height - 5)
    products = [box for box in boxes if box.row == "products"]
    for box in products:
        drawing.box(left + box.begin * unit, y + 2, (box.end - box.begin) * unit, row_height - 5, COLOURS["busy"])
    busy = sum(box.end - box.begin for box in products)
    model = "a copied tile and a product are drawn as one unit, a softmax as two"
    drawing.text(left, y + row_height + 20, f"tensor cores busy for {busy:g} of {end:g} units; {model}")
    return drawing.svg()


LADDER = "docs/ladder/images"
PICTURES = {
    "docs/images/sectors.svg": sectors,
    f"{LADDER}/row_tile.svg": row_tile,
    f"{LADDER}/fragments.svg": fragments,
    f"{LADDER}/swizzle.svg": swizzle,
    f"{LADDER}/causal_tiles.svg": causal_tiles,
    f"{LADDER}/persistent_tiles.svg": persistent,
    **{
        f"{LADDER}/pipeline_{rung.split('_')[0]}.svg": lambda command, rung=rung: timeline(command, rung)
        for rung in PIPELINES
    },
}
