#include "cli/trace/page.h"

#include <algorithm>
#include <map>

#include "cli/output/format.h"
#include "cli/output/json.h"

namespace flash_attention::cli {
namespace {

using emulator::Machine;
using emulator::Span;
using emulator::Timeline;
using emulator::UnitSpan;

constexpr int first_unit_row = 10000;  // thread numbers of units follow those of warps

/// Colours and legend of the page follow these names.
const char* class_of(const Span& span) {
  if (span.waits) return "wait";
  if (span.what.find("exponentials") != std::string::npos) return "exponentials";
  if (span.what.find("mma FLOPs") != std::string::npos) return "products";
  if (span.what.find("bytes") != std::string::npos) return "memory";
  return "arithmetic";
}
const char* class_of(const UnitSpan& span) {
  switch (span.unit) {
    case emulator::Unit::tensor:
      return "products";
    case emulator::Unit::special:
      return "exponentials";
    case emulator::Unit::shared:
    case emulator::Unit::l2:
      return "memory";
    default:
      return "arithmetic";
  }
}

std::string name_of_block(const TracedLaunch& launch, int block) {
  const int copy = block / launch.record.cluster;
  const auto& index = launch.record.blocks[static_cast<std::size_t>(block % launch.record.cluster)].index;
  return format("block (%u, %u, %u)%s", index[0], index[1], index[2], copy > 0 ? " again, on the same SM" : "");
}

double microseconds(double clocks, const Machine& machine) { return clocks / (machine.clock_ghz * 1e3); }

Json event(const char* phase, int process, int thread, const std::string& name) {
  Json json = Json::object();
  json.add("ph", phase).add("pid", process).add("tid", thread).add("name", name);
  return json;
}

Json named(const char* what, int process, int thread, const std::string& name) {
  Json arguments = Json::object();
  arguments.add("name", name);
  return event("M", process, thread, what).add("args", arguments);
}

/// Spans of a row in the order of time, with those that touch and are alike in one.
template <typename SpanOf>
std::vector<SpanOf> joined(std::vector<SpanOf> spans) {
  std::sort(spans.begin(), spans.end(), [](const SpanOf& a, const SpanOf& b) { return a.begin < b.begin; });
  std::vector<SpanOf> result;
  for (SpanOf& span : spans) {
    if (!result.empty() && result.back().what == span.what && span.begin <= result.back().end + 0.5) {
      result.back().end = std::max(result.back().end, span.end);
    } else {
      result.push_back(std::move(span));
    }
  }
  return result;
}

std::map<std::pair<int, int>, std::vector<Span>> rows_of_warps(const Timeline& timeline) {
  std::map<std::pair<int, int>, std::vector<Span>> rows;
  for (const Span& span : timeline.warps) rows[{span.block, span.warp}].push_back(span);
  for (auto& [key, spans] : rows) spans = joined(std::move(spans));
  return rows;
}
std::map<std::pair<int, int>, std::vector<UnitSpan>> rows_of_units(const Timeline& timeline) {
  std::map<std::pair<int, int>, std::vector<UnitSpan>> rows;
  for (const UnitSpan& span : timeline.units) rows[{span.sm, static_cast<int>(span.unit)}].push_back(span);
  for (auto& [key, spans] : rows) spans = joined(std::move(spans));
  return rows;
}

template <typename SpanOf>
Json row_of(const std::string& name, const std::vector<SpanOf>& spans, std::map<std::string, int>& texts) {
  Json list = Json::array();
  for (const SpanOf& span : spans) {
    const int text = texts.try_emplace(span.what, static_cast<int>(texts.size())).first->second;
    Json entry = Json::array();
    entry.push(static_cast<std::int64_t>(span.begin + 0.5)).push(static_cast<std::int64_t>(span.end + 0.5));
    list.push(entry.push(class_of(span)).push(text));
  }
  Json row = Json::object();
  return row.add("name", name).add("spans", list);
}

/// `<` would end a script.
std::string in_script(const Json& json) {
  std::string text = json.text();
  for (std::size_t at = 0; (at = text.find('<', at)) != std::string::npos;) text.replace(at, 1, "\\u003c");
  return text;
}

std::string escaped(std::string text) {
  for (const auto& [from, to] : {std::pair{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}}) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += std::string_view(to).size())
      text.replace(at, 1, to);
  }
  return text;
}

// The page: %title%, %summary%, %units%, %rates% and %data% are filled in.
constexpr const char* page_template = R"page(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>%title%</title><style>
:root { --paper: #fff; --ink: #1a1a1a; --soft: #666; --line: #ddd; --wait: #d9d9d9; --products: #2f6fbf; --exponentials: #d9822b;
  --memory: #3a9a5c; --arithmetic: #8e6bbf; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171a; --ink: #e6e6e6; --soft: #9a9a9a; --line: #333; --wait: #3a3d42;
  --products: #5a97e0; --exponentials: #eaa04f; --memory: #5dbb7f; --arithmetic: #ab8ad6; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 1rem; }
h1 { font-size: 1.2rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin-top: 1.5rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } td, th { padding: .15rem .7rem .15rem 0; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
canvas { display: block; width: 100%; touch-action: pan-y; cursor: grab; }
#tip { min-height: 1.5em; color: var(--soft); overflow-wrap: anywhere; }
.legend span { margin-right: 1rem; white-space: nowrap; } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
button { font: inherit; }
</style></head><body>
<h1>%title%</h1>
<p>%summary%</p>
<h2>One block in time</h2>
<p class="legend"></p>
<p><button id="in">closer</button> <button id="out">farther</button> <button id="all">all</button></p>
<canvas id="c"></canvas><div id="tip">Point at a span to read it; drag to move, Ctrl and the wheel to zoom.</div>
<h2>What the units did</h2><div class="scroll"><table>%units%</table></div>
<h2>The machine</h2>
<p>Waits, copies and products are those that the emulator recorded. Their times follow from these rates alone: none was fitted to a kernel.
Index arithmetic and plain sums go through no wrapper and are not counted.</p><div class="scroll"><table>%rates%</table></div>
<script>
const data = %data%;
const canvas = document.getElementById("c"), tip = document.getElementById("tip"), pen = canvas.getContext("2d");
const kinds = { wait: "waits", products: "products", exponentials: "exponentials", memory: "memory", arithmetic: "other arithmetic" };
const style = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name);
document.querySelector(".legend").innerHTML =
  Object.entries(kinds).map(([kind, text]) => `<span><i style="background: var(--${kind})"></i>${text}</span>`).join("");
const high = 16, gap = 3, top_ = 20;
let first = 0, last = data.clocks, label = 150;
function draw() {
  const wide = canvas.clientWidth, scale = devicePixelRatio || 1;
  label = wide < 600 ? 84 : 150;
  canvas.style.height = top_ + data.rows.length * (high + gap) + "px";
  canvas.width = wide * scale; canvas.height = (top_ + data.rows.length * (high + gap)) * scale;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, wide, canvas.height);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  const x = clock => label + (clock - first) / (last - first) * (wide - label);
  const step = 10 ** Math.floor(Math.log10((last - first) / 4)) * ((last - first) / 10 ** Math.floor(Math.log10((last - first) / 4)) > 20 ? 5 : 2);
  pen.fillStyle = style("soft");
  for (let clock = Math.ceil(first / step) * step; clock <= last; clock += step) {
    pen.fillText(clock.toLocaleString(), Math.min(x(clock), wide - 40), 8);
    pen.fillRect(x(clock), 14, 1, 4);
  }
  data.rows.forEach((row, i) => {
    const y = top_ + i * (high + gap);
    pen.fillStyle = style("ink");
    pen.fillText(row.name, 0, y + high / 2, label - 6);
    for (const [begin, end, kind] of row.spans) {
      if (end < first || begin > last) continue;
      const from = Math.max(x(begin), label), to = Math.min(x(end), wide);
      pen.fillStyle = style(kind);
      pen.fillRect(from, y, Math.max(to - from, 0.5), high);
    }
  });
}
function zoom(factor, at = (first + last) / 2) {
  const length = Math.min(Math.max((last - first) * factor, 50), data.clocks);
  const share = (at - first) / (last - first);
  first = Math.min(Math.max(at - share * length, 0), data.clocks - length); last = first + length; draw();
}
const clock_at = event => first + (event.offsetX - label) / (canvas.clientWidth - label) * (last - first);
canvas.addEventListener("wheel", event => {
  if (!event.ctrlKey) return;
  event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, clock_at(event));
}, { passive: false });
let held = null;
canvas.addEventListener("pointerdown", event => { held = [event.offsetX, first]; });
addEventListener("pointerup", () => { held = null; });
canvas.addEventListener("pointermove", event => {
  if (held) {
    const length = last - first, moved = (event.offsetX - held[0]) / (canvas.clientWidth - label) * length;
    first = Math.min(Math.max(held[1] - moved, 0), data.clocks - length); last = first + length; draw();
    return;
  }
  const row = data.rows[Math.floor((event.offsetY - top_) / (high + gap))], clock = clock_at(event);
  const span = row && row.spans.find(([begin, end]) => begin <= clock && clock < end);
  tip.textContent = span ? `${row.name}, ${span[0].toLocaleString()} to ${span[1].toLocaleString()} clocks: ` +
    (span[2] == "wait" ? "waits: " : "") + data.texts[span[3]] : row ? row.name : "";
});
document.getElementById("in").onclick = () => zoom(0.5);
document.getElementById("out").onclick = () => zoom(2);
document.getElementById("all").onclick = () => { first = 0; last = data.clocks; draw(); };
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
</script></body></html>
)page";

std::string filled(std::string text, const std::map<std::string, std::string>& values) {
  for (const auto& [name, value] : values) {
    const std::string mark = "%" + name + "%";
    for (std::size_t at = 0; (at = text.find(mark, at)) != std::string::npos; at += value.size())
      text.replace(at, mark.size(), value);
  }
  return text;
}

}  // namespace

std::string chrome_trace(const TracedLaunch& launch, const Machine& machine) {
  Json events = Json::array();
  for (const auto& [key, spans] : rows_of_warps(launch.timeline)) {
    const auto [block, warp] = key;
    events.push(named("process_name", block, 0, name_of_block(launch, block)));
    events.push(named("thread_name", block, warp, format("warp %d, warpgroup %d", warp, warp / 4)));
    for (const Span& span : spans) {
      Json entry = event("X", block, warp, span.waits ? "waits: " + span.what : class_of(span));
      Json arguments = Json::object();
      arguments.add("what", span.what).add("clocks", span.end - span.begin);
      entry.add("cat", class_of(span)).add("ts", microseconds(span.begin, machine));
      events.push(entry.add("dur", microseconds(span.end - span.begin, machine)).add("args", arguments));
    }
  }
  for (const auto& [key, spans] : rows_of_units(launch.timeline)) {
    const auto [sm, unit] = key;
    events.push(named("thread_name", sm, first_unit_row + unit, to_string(static_cast<emulator::Unit>(unit))));
    for (const UnitSpan& span : spans) {
      Json entry = event("X", sm, first_unit_row + unit, span.what);
      entry.add("cat", class_of(span)).add("ts", microseconds(span.begin, machine));
      events.push(entry.add("dur", microseconds(span.end - span.begin, machine)));
    }
  }
  Json json = Json::object();
  return json.add("displayTimeUnit", "ns").add("traceEvents", events).text();
}

std::string trace_page(const std::string& title, const TracedLaunch& launch, const Machine& machine) {
  std::map<std::string, int> texts;
  Json rows = Json::array();
  for (const auto& [key, spans] : rows_of_units(launch.timeline)) {
    const std::string sm = launch.record.cluster > 1 ? format(", SM %d", key.first) : "";
    rows.push(row_of(to_string(static_cast<emulator::Unit>(key.second)) + sm, spans, texts));
  }
  for (const auto& [key, spans] : rows_of_warps(launch.timeline)) {
    const std::string block = key.first > 0 ? format("block %d, ", key.first) : "";
    rows.push(row_of(block + format("warp %d", key.second), spans, texts));
  }
  std::vector<std::string> ordered(texts.size());
  for (const auto& [text, number] : texts) ordered[static_cast<std::size_t>(number)] = text;
  Json list = Json::array();
  for (const std::string& text : ordered) list.push(text);
  Json data = Json::object();
  data.add("clocks", launch.timeline.clocks).add("rows", rows).add("texts", list);

  std::string units, rates;
  for (int u = 0; u < emulator::num_units; ++u) {
    const double share = launch.timeline.busy[static_cast<std::size_t>(u)] / launch.timeline.clocks;
    units +=
        format("<tr><td>%s</td><td class=\"n\">%.0f %%</td></tr>", to_string(static_cast<emulator::Unit>(u)), 100 * share);
  }
  units += format("<tr><td>warps that wait</td><td class=\"n\">%.0f %%</td></tr>", 100 * launch.timeline.waiting);
  for (const emulator::Rate& rate : machine.rates()) {
    rates += format("<tr><td>%s</td><td class=\"n\">%g</td><td>%s</td><td>%s</td></tr>", rate.name, rate.value, rate.unit,
                    escaped(rate.source).c_str());
  }
  const emulator::Prediction& p = launch.prediction;
  const std::string summary = format(
      "%u x %u x %u blocks of %d threads, %d on an SM. One takes %.0f clocks by the model; busiest: %s. By the model the "
      "launch takes %s on an %s, bound by %s.",
      launch.record.grid[0], launch.record.grid[1], launch.record.grid[2], launch.record.threads, p.resident,
      launch.timeline.clocks, to_string(launch.timeline.critical), format_seconds(p.seconds).c_str(), machine.name,
      p.bound.c_str());
  return filled(page_template, {{"title", escaped(title)},
                       {"summary", escaped(summary)},
                       {"units", units},
                       {"rates", rates},
                       {"data", in_script(data)}});
}

}  // namespace flash_attention::cli
