"""Charts as PNG files, with matplotlib."""

from .svg import LIGHT, colours, title_lines


def write(chart, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.8), dpi=150)
    {"bars": bars, "lines": lines, "points": points, "heat": heat}[chart.kind](chart, axes)
    axes.set_title("\n".join(title_lines(chart)), fontsize=10)
    axes.set_xlabel(chart.x_label)
    if chart.kind != "heat":
        axes.set_ylabel(chart.y_label)
        axes.grid(axis="y", alpha=0.3)
        if len(chart.series) > 1:
            axes.legend(fontsize=7, ncols=3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def bars(chart, axes):
    colour = colours(chart.series)
    width = 0.86 / len(chart.series)
    for i, (name, values) in enumerate(chart.series.items()):
        places = [c + (i - (len(chart.series) - 1) / 2) * width for c in range(len(chart.x))]
        heights = [v or 0 for v in values]
        drawn = axes.bar(places, heights, width * 0.9, label=name, color=LIGHT[colour[name]])
        labels = [chart.text(name, c) if v is not None else "" for c, v in enumerate(values)]
        axes.bar_label(drawn, labels, fontsize=5, rotation=90, padding=2)
    axes.set_xticks(range(len(chart.x)), [str(x) for x in chart.x])
    axes.margins(y=0.15)
    if chart.log_y:
        axes.set_yscale("log")


def lines(chart, axes):
    colour = colours(chart.series)
    for name, values in chart.series.items():
        held = [(x, v) for x, v in zip(chart.x, values, strict=True) if v is not None]
        axes.plot(*zip(*held, strict=True), marker="o", label=name, color=LIGHT[colour[name]])
    axes.set_xscale("log" if chart.log_x else "linear", **({"base": 2} if chart.log_x else {}))
    axes.set_yscale("log" if chart.log_y else "linear")
    axes.set_xticks(chart.x, [str(x) for x in chart.x])


def points(chart, axes):
    colour = colours(chart.series)
    for name, values in chart.series.items():
        axes.scatter(*zip(*values, strict=True), label=name, color=LIGHT[colour[name]])
    roof, slope = chart.ceilings["tflops"], chart.ceilings["copy_gbs"] / 1e3
    ends = [x for values in chart.series.values() for x, _ in values] + [roof / slope]
    xs = [min(ends) / 2, roof / slope, max(ends) * 2]
    axes.plot(xs, [min(roof, x * slope) for x in xs], color="black")
    axes.set(xscale="log", yscale="log")


def heat(chart, axes):
    rows = [[v if v is not None else float("nan") for v in values] for values in chart.series.values()]
    axes.imshow(rows, cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto")
    axes.set_xticks(range(len(chart.x)), [str(x) for x in chart.x])
    axes.set_yticks(range(len(rows)), list(chart.series), fontsize=6)
    for r, values in enumerate(chart.series.values()):
        for c, value in enumerate(values):
            if value is not None:
                axes.text(c, r, f"{value:.2f}", ha="center", va="center", fontsize=7)
