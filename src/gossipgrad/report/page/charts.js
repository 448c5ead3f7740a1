// Curves: of one run a thin line a rank, a bold mean, dots for what was measured exactly; of
// several runs a line for each.

const chartHeight = 250;
const margin = { top: 10, right: 12, bottom: 36 };
const runStyles = 8;

// A curve that spans this many times its least value is read better on a log scale.
const logRatio = 30;
const hiddenRuns = new Set();
let overTime = false;

function extent(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}

// The curves as they are drawn now: points [x, y, upper], without those of hidden runs.
function curvesOf(spec) {
  return spec.series
    .filter(({ run }) => !hiddenRuns.has(run))
    .map((series) => ({
      ...series,
      points: series.points
        .map(([x, y, seconds, upper]) => [overTime ? seconds : x, y, upper])
        .filter(([x]) => x !== null),
    }))
    .filter(({ points }) => points.length);
}

function yScale(values, spec) {
  let [low, high] = extent(values);
  const span = chartHeight - margin.top - margin.bottom;
  const bottom = chartHeight - margin.bottom;
  // Curves that start at 0 keep their log scale: what is below the floor is drawn on it.
  const positive = values.filter((v) => v > 0).sort((a, b) => a - b);
  const floor = positive[Math.floor(positive.length / 50)];
  if (!spec.isShare && low >= 0 && positive.length && high / floor > logRatio) {
    low = floor * 0.8;
    high *= 1.15;
    const unit = span / Math.log(high / low);
    const place = (v) => bottom - unit * Math.log(Math.max(v, low) / low);
    return { place, marks: logTicks(low, high), log: true };
  }
  if (low >= 0 && low < 0.5 * high) low = 0;
  let range = high - low;
  // Less cannot be told apart: a level line with room above and below.
  if (range <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) range = Math.abs(high) || 1;
  // Shares end at 100 %, unless there are more.
  const most = spec.isShare && high <= 1 ? 1 : Infinity;
  if (low !== 0) low -= 0.06 * range;
  high = Math.min(most, high + 0.06 * range);
  return {
    place: (v) => bottom - (span * (v - low)) / (high - low),
    marks: ticks(low, high, 5),
    log: false,
  };
}

function styleOf({ role, run }, alone) {
  return `${role} ${run === null ? "" : `run-${run % runStyles}`} ${alone ? "alone" : ""}`;
}

function legend(box, spec) {
  const entries = new Map();
  for (const series of spec.series) {
    if (series.run === null) {
      const names = { rank: "each worker", mean: "mean", exact: "exact", range: "all workers" };
      entries.set(series.role, [series, names[series.role]]);
    } else if (!entries.has(series.run)) {
      entries.set(series.run, [series, data.runs[series.run]]);
    }
  }
  if (entries.size < 2 && data.runs.length === 1) return;
  const list = html(box, "ul", "", { class: "legend" });
  for (const [series, name] of [...entries.values()]) {
    const item = html(list, "li");
    const mark = svg(item, "svg", { viewBox: "0 0 28 10", "aria-hidden": "true" });
    const shown = styleOf(series, false);
    if (series.role === "exact" && series.run === null) {
      svg(mark, "circle", { class: `dot ${shown}`, cx: 14, cy: 5, r: 3 });
    } else if (series.role === "range") svg(mark, "rect", { class: "band", width: 28, height: 10 });
    else svg(mark, "path", { class: `line ${shown.replace("exact", "mean")}`, d: "M0 5H28" });
    item.append(name);
  }
}

function drawAxes(root, spec, scales, width) {
  const { x, y, texts, firstX, lastX, bottom, left, right } = scales;
  y.marks.forEach((mark, i) => {
    svg(root, "path", { class: "grid", d: `M${left} ${y.place(mark)}H${right}` });
    svg(root, "text", { class: "end", x: left - 8, y: y.place(mark) + 4 }, texts[i]);
  });
  svg(root, "path", { class: "axis", d: `M${left} ${bottom}H${right}` });
  const marks = ticks(firstX, lastX, Math.max(2, width / 110));
  for (const mark of overTime ? marks : marks.filter(Number.isInteger)) {
    svg(root, "text", { class: "middle", x: x(mark), y: bottom + 16 }, words(mark));
  }
  const label = overTime ? "seconds since the start" : spec.xLabel;
  svg(root, "text", { class: "middle", x: (left + right) / 2, y: chartHeight - 4 }, label);
  if (y.log) svg(root, "text", { class: "end", x: right, y: chartHeight - 4 }, "log scale");
}

function drawChart(root, spec, width) {
  root.replaceChildren();
  root.setAttribute("viewBox", `0 0 ${width} ${chartHeight}`);
  root.setAttribute("height", chartHeight);
  const curves = curvesOf(spec);
  const points = curves.flatMap((series) => series.points);
  const right = width - margin.right;
  if (!points.length) {
    const place = { class: "middle", x: width / 2, y: chartHeight / 2 };
    svg(root, "text", place, "nothing to draw");
    return null;
  }
  const [firstX, lastX] = extent(points.map(([x]) => x));
  const y = yScale(points.flatMap(([, low, high]) => (high === undefined ? [low] : [low, high])), spec);
  const texts = y.log ? y.marks.map(words) : markTexts(y.marks, spec.isShare);
  const left = Math.max(56, ...texts.map((text) => 7 * text.length + 12));
  const x = (v) =>
    lastX === firstX ? (left + right) / 2 : left + ((right - left) * (v - firstX)) / (lastX - firstX);
  const write = spec.isShare ? percent : words;
  const bottom = chartHeight - margin.bottom;
  const scales = { curves, x, y, texts, firstX, lastX, bottom, left, right, write };
  drawAxes(root, spec, scales, width);
  const path = (at) => at.map(([px, py]) => `${x(px).toFixed(1)} ${y.place(py).toFixed(1)}`).join("L");
  for (const series of curves) {
    const { role, points: curve } = series;
    const shown = styleOf(series, curves.length === 1);
    if (role === "range") {
      const back = curve.map(([px, , high]) => [px, high]).reverse();
      svg(root, "path", { class: "band", d: `M${path(curve)}L${path(back)}Z` });
      continue;
    }
    const isDots = role === "exact" && spec.series.some((other) => other.role !== "exact");
    if (!isDots || series.run === null) svg(root, "path", { class: `line ${shown}`, d: `M${path(curve)}` });
    if (role !== "exact" && curve.length > 1) continue;
    for (const [px, py] of curve) {
      svg(root, "circle", { class: `dot ${shown}`, cx: x(px), cy: y.place(py), r: 3 });
    }
  }
  return scales;
}

// Where the pointer stops, and how far from a stop a point may be to be read there.
function stopsOf(curves) {
  const stops = [...new Set(curves.flatMap((s) => s.points.map(([x]) => x)))].sort((a, b) => a - b);
  const span = stops[stops.length - 1] - stops[0];
  const most = overTime ? Math.max(...curves.map((s) => s.points.length)) : stops.length;
  return { stops, reach: most > 1 ? span / (most - 1) / 2 : Math.max(1, span) };
}

// The value of each series at or next to x, the mean and the exact ones first.
function valuesAt(curves, at, reach) {
  const found = [];
  for (const series of curves) {
    let nearest = series.points[0];
    for (const point of series.points) {
      if (Math.abs(point[0] - at) < Math.abs(nearest[0] - at)) nearest = point;
    }
    if (Math.abs(nearest[0] - at) <= reach * 1.001) found.push({ series, point: nearest });
  }
  return found.sort((a, b) => (a.series.role === "rank") - (b.series.role === "rank"));
}

function mountChart(box, spec) {
  const title = box.closest("figure").querySelector("h2").textContent;
  legend(box, spec);
  const root = svg(box, "svg", { role: "img", tabindex: 0 });
  root.setAttribute(
    "aria-label",
    `${title} over ${spec.xLabel}s. Arrow keys read the values; they are in the table below, too.`,
  );
  let scales = null;
  let stops = [];
  let reach = 0;
  let stop = -1;

  function point(index) {
    if (!scales) return;
    stop = clamp(index, 0, stops.length - 1);
    const at = stops[stop];
    root.querySelector(".pointer")?.remove();
    const layer = svg(root, "g", { class: "pointer" });
    const px = scales.x(at);
    svg(layer, "path", { class: "cursor", d: `M${px} ${margin.top}V${scales.bottom}` });
    const found = valuesAt(scales.curves, at, reach);
    for (const { series, point: [vx, vy] } of [...found].reverse()) {
      if (series.role === "range") continue;
      const place = { cx: scales.x(vx), cy: scales.y.place(vy), r: series.role === "rank" ? 2.5 : 4 };
      svg(layer, "circle", { class: `dot ${styleOf(series, scales.curves.length === 1)}`, ...place });
    }
    const text = ([, low, high]) =>
      high === undefined ? scales.write(low) : `${scales.write(low)} to ${scales.write(high)}`;
    const rows = found.slice(0, 12).map(({ series, point: read }) => [series.label, text(read)]);
    if (found.length > 12) rows.push([`and ${found.length - 12} more`, ""]);
    const frame = root.getBoundingClientRect();
    const heading = overTime ? `after ${words(at)} s` : `${spec.xLabel} ${words(Math.round(at))}`;
    showTooltip(heading, rows, frame.left + px, frame.top + chartHeight / 2);
  }

  function leave() {
    root.querySelector(".pointer")?.remove();
    stop = -1;
    hideTooltip();
  }

  onPointing(
    root,
    (event) => {
      if (!scales) return;
      const px = event.clientX - root.getBoundingClientRect().left;
      let nearest = 0;
      stops.forEach((at, i) => {
        if (Math.abs(scales.x(at) - px) < Math.abs(scales.x(stops[nearest]) - px)) nearest = i;
      });
      point(nearest);
    },
    leave,
  );
  root.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!move) return;
    event.preventDefault();
    point(stop < 0 ? (move > 0 ? 0 : stops.length - 1) : stop + move);
  });
  drawToFit(box, (width) => {
    scales = drawChart(root, spec, width);
    if (scales) ({ stops, reach } = stopsOf(scales.curves));
  });
}

for (const spec of data.charts) {
  mountChart(document.querySelector(`[data-chart="${spec.id}"]`), spec);
}

const axisButton = document.getElementById("axis");
axisButton.hidden = !data.charts.some((c) => c.series.some((s) => s.points.some((p) => p[2] !== null)));
axisButton.addEventListener("click", () => {
  overTime = !overTime;
  axisButton.setAttribute("aria-pressed", overTime);
  redrawAll();
});

for (const toggle of document.querySelectorAll(".run-toggle")) {
  toggle.addEventListener("click", () => {
    const run = Number(toggle.dataset.run);
    if (!hiddenRuns.delete(run)) hiddenRuns.add(run);
    toggle.setAttribute("aria-pressed", !hiddenRuns.has(run));
    redrawAll();
  });
}
