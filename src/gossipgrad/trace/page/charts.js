// Curves: one thin line a rank, a bold mean, dots for what was measured exactly.

const chartHeight = 250;
const margin = { top: 10, right: 12, bottom: 36, left: 56 };

// A curve that spans this many times its least value is read better on a log scale.
const logRatio = 30;

function extent(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}

function yScale(values, spec) {
  let [low, high] = extent(values);
  const span = chartHeight - margin.top - margin.bottom;
  const bottom = chartHeight - margin.bottom;
  // Curves that start at 0 keep their log scale: what is below the floor is drawn on it.
  const positive = values.filter((v) => v > 0).sort((a, b) => a - b);
  const floor = positive[Math.floor(positive.length / 50)];
  if (spec.yFormat === "number" && low >= 0 && positive.length && high / floor > logRatio) {
    low = floor * 0.8;
    high *= 1.15;
    const unit = span / Math.log(high / low);
    const place = (v) => bottom - unit * Math.log(Math.max(v, low) / low);
    return { place, marks: logTicks(low, high), log: true };
  }
  if (spec.yFormat === "number" && low >= 0 && low < 0.5 * high) low = 0;
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  if (low !== 0) low -= pad;
  high = spec.yFormat === "percent" ? Math.min(1, high + pad) : high + pad;
  if (high <= low) high = low + pad;
  return {
    place: (v) => bottom - (span * (v - low)) / (high - low),
    marks: ticks(low, high, 5),
    log: false,
  };
}

function legend(box, spec) {
  const roles = [...new Set(spec.series.map((series) => series.role))].reverse();
  if (roles.length < 2) return;
  const names = { rank: "each worker", mean: "mean", exact: "exact" };
  const list = html(box, "ul");
  list.className = "legend";
  for (const role of roles) {
    const item = html(list, "li");
    const mark = svg(item, "svg", { viewBox: "0 0 18 10", "aria-hidden": "true" });
    if (role === "exact") svg(mark, "circle", { class: "dot exact", cx: 9, cy: 5, r: 3 });
    else svg(mark, "path", { class: `line ${role}`, d: "M0 5H18" });
    item.append(names[role]);
  }
}

function drawChart(root, spec, width) {
  root.replaceChildren();
  root.setAttribute("viewBox", `0 0 ${width} ${chartHeight}`);
  root.setAttribute("height", chartHeight);
  const points = spec.series.flatMap((series) => series.points);
  const [firstX, lastX] = extent(points.map(([x]) => x));
  const right = width - margin.right;
  const x = (v) =>
    lastX === firstX
      ? (margin.left + right) / 2
      : margin.left + ((right - margin.left) * (v - firstX)) / (lastX - firstX);
  const y = yScale(points.map(([, value]) => value), spec);
  const write = spec.yFormat === "percent" ? percent : words;
  const bottom = chartHeight - margin.bottom;
  for (const mark of y.marks) {
    svg(root, "path", { class: "grid", d: `M${margin.left} ${y.place(mark)}H${right}` });
    svg(root, "text", { class: "end", x: margin.left - 8, y: y.place(mark) + 4 }, write(mark));
  }
  svg(root, "path", { class: "axis", d: `M${margin.left} ${bottom}H${right}` });
  const wholeTicks = ticks(firstX, lastX, Math.max(2, width / 110)).filter(Number.isInteger);
  for (const mark of wholeTicks) {
    svg(root, "text", { class: "middle", x: x(mark), y: bottom + 16 }, words(mark));
  }
  svg(root, "text", { class: "middle", x: (margin.left + right) / 2, y: chartHeight - 4 }, spec.xLabel);
  if (y.log) svg(root, "text", { class: "end", x: right, y: chartHeight - 4 }, "log scale");
  const alone = spec.series.length === 1 ? "alone" : "";
  for (const { role, points: curve } of spec.series) {
    const d = curve.map(([px, py]) => `${x(px).toFixed(1)} ${y.place(py).toFixed(1)}`).join("L");
    svg(root, "path", { class: `line ${role} ${alone}`, d: `M${d}` });
    if (role !== "exact" && curve.length > 1) continue;
    for (const [px, py] of curve) {
      svg(root, "circle", { class: `dot ${role} ${alone}`, cx: x(px), cy: y.place(py), r: 3 });
    }
  }
  return { x, y: y.place, bottom, write };
}

// The value of each series at or next to x, the mean and the exact ones first.
function valuesAt(spec, at, reach) {
  const found = [];
  for (const { label, role, points } of spec.series) {
    let nearest = points[0];
    for (const point of points) {
      if (Math.abs(point[0] - at) < Math.abs(nearest[0] - at)) nearest = point;
    }
    if (Math.abs(nearest[0] - at) <= reach) found.push({ label, role, point: nearest });
  }
  return found.sort((a, b) => (a.role === "rank") - (b.role === "rank"));
}

function mountChart(box, spec) {
  const title = box.closest("figure").querySelector("h2").textContent;
  legend(box, spec);
  const root = svg(box, "svg", { role: "img", tabindex: 0 });
  root.setAttribute(
    "aria-label",
    `${title} over ${spec.xLabel}s. Arrow keys read the values; they are in the table below, too.`,
  );
  const stops = [...new Set(spec.series.flatMap((s) => s.points.map(([x]) => x)))].sort((a, b) => a - b);
  const reach = stops.length > 1 ? (stops[stops.length - 1] - stops[0]) / (stops.length - 1) / 2 : 1;
  let scales;
  let stop = -1;

  function point(index) {
    stop = Math.min(stops.length - 1, Math.max(0, index));
    const at = stops[stop];
    root.querySelector(".pointer")?.remove();
    const layer = svg(root, "g", { class: "pointer" });
    const px = scales.x(at);
    svg(layer, "path", { class: "cursor", d: `M${px} ${margin.top}V${scales.bottom}` });
    const found = valuesAt(spec, at, reach);
    const alone = spec.series.length === 1 ? "alone" : "";
    for (const { role, point: [vx, vy] } of [...found].reverse()) {
      const place = { cx: scales.x(vx), cy: scales.y(vy), r: role === "rank" ? 2.5 : 4 };
      svg(layer, "circle", { class: `dot ${role} ${alone}`, ...place });
    }
    const rows = found.slice(0, 12).map(({ label, point: [, value] }) => [label, scales.write(value)]);
    if (found.length > 12) rows.push([`and ${found.length - 12} more`, ""]);
    const frame = root.getBoundingClientRect();
    showTooltip(`${spec.xLabel} ${words(Math.round(at))}`, rows, frame.left + px, frame.top + chartHeight / 2);
  }

  function leave() {
    root.querySelector(".pointer")?.remove();
    stop = -1;
    hideTooltip();
  }

  root.addEventListener("pointermove", (event) => {
    const px = event.clientX - root.getBoundingClientRect().left;
    let nearest = 0;
    stops.forEach((at, i) => {
      if (Math.abs(scales.x(at) - px) < Math.abs(scales.x(stops[nearest]) - px)) nearest = i;
    });
    point(nearest);
  });
  root.addEventListener("pointerleave", leave);
  root.addEventListener("blur", leave);
  root.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!move) return;
    event.preventDefault();
    point(stop < 0 ? (move > 0 ? 0 : stops.length - 1) : stop + move);
  });
  drawToFit(box, (width) => {
    scales = drawChart(root, spec, width);
  });
}

for (const spec of data.charts) {
  mountChart(document.querySelector(`[data-chart="${spec.id}"]`), spec);
}
