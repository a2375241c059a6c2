"""What a report shows, as data: every chart carries its own table. Drawing is the business of svg.py and png.py."""

from dataclasses import dataclass, field


@dataclass
class Chart:
    """series[name][i] is the value at x[i], None where there is none.

    kind: "bars" (x are labels), "lines" (x are numbers), "heat" (series are rows), "points" (values are (x, y) pairs).
    """

    name: str
    title: str
    kind: str
    x_label: str
    y_label: str
    x: list
    series: dict[str, list]
    log_x: bool = False
    log_y: bool = False
    unsure: set = field(default_factory=set)  # (series, index) whose samples spread too much
    ceilings: dict = field(default_factory=dict)  # "points": {"tflops", "copy_gbs"}
    note: str = ""
    commit_of: dict = field(default_factory=dict)  # (series, index): what was measured

    @property
    def commits(self):
        return tuple(dict.fromkeys(self.commit_of.values()))

    def table(self):
        """(header, rows) of text."""
        if self.kind == "points":
            rows = [[n, cell(x), cell(y)] for n, values in self.series.items() for x, y in values]
            return ["", self.x_label, self.y_label], rows
        header = [self.x_label, *(cell(x) for x in self.x)]
        return header, [[n, *(self.text(n, i) for i in range(len(self.x)))] for n in self.series]

    def text(self, name, index):
        return cell(self.series[name][index]) + ("~" if (name, index) in self.unsure else "")


@dataclass
class Table:
    name: str
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    commits: tuple = ()

    def table(self):
        return self.header, self.rows


def cell(value):
    """A number as people read it: three significant digits, no exponent between 0.001 and a million."""
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
