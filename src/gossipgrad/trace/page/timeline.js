// A few steps of all ranks: what each worked at, and what was on its way meanwhile.

const laneHeight = 18;
const rankGap = 30;
const axisHeight = 24;
const labelWidth = 132;
const rightMargin = 24;
const leastWidth = 760;
const knownNames = new Set([
  "forward", "backward", "optimizer", "data", "evaluate",
  "exchange", "wait", "mix", "snapshot", "average",
]);

function kindClass(name) {
  return knownNames.has(name) ? name : "other";
}

function attributeText(name, value) {
  if (name === "bytes" && typeof value === "number") return `${value.toLocaleString("en")} bytes`;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function drawTimeline(box, spec, width) {
  box.replaceChildren();
  const full = Math.max(width, leastWidth);
  const x = (t) => labelWidth + ((full - labelWidth - rightMargin) * t) / spec.length;
  const lanes = spec.ranks.reduce((sum, rank) => sum + rank.lanes.length, 0);
  const height = axisHeight + spec.ranks.length * rankGap + lanes * laneHeight + 4;
  const label = "Timeline of a few steps; the times by rank are in the table below.";
  const root = svg(box, "svg", { width: full, height, role: "img", "aria-label": label });
  const marks = ticks(0, spec.length / 1000, full / 110);
  const decimals = Math.max(0, ...marks.map((mark) => (String(mark).split(".")[1] || "").length));
  for (const mark of marks) {
    svg(root, "path", { class: "grid", d: `M${x(1000 * mark)} ${axisHeight}V${height}` });
    svg(root, "text", { class: "middle", x: x(1000 * mark), y: 14 }, `${mark.toFixed(decimals)} ms`);
  }
  let y = axisHeight;
  for (const rank of spec.ranks) {
    svg(root, "text", { class: "rank-name", x: 0, y: y + 20 }, `rank ${rank.rank}`);
    y += rankGap;
    for (const lane of rank.lanes) {
      svg(root, "text", { x: 10, y: y + 13 }, lane.name);
      svg(root, "rect", { class: "row", x: x(0), y, width: x(spec.length) - x(0), height: laneHeight - 2 });
      for (const span of lane.spans) drawSpan(root, rank.rank, span, x, y, spec.length);
      y += laneHeight;
    }
  }
  return root;
}

function isMissed([, , name, { outcome }]) {
  return name === "exchange" && outcome !== undefined && outcome !== "delivered";
}

function partnersText({ send_to: to, recv_from: from }) {
  if (to === from) return to == null ? "exchange" : `with ${to}`;
  return [to == null ? "" : `to ${to}`, from == null ? "" : `from ${from}`].filter(Boolean).join(", ");
}

function drawSpan(root, rank, span, x, y, length) {
  const [start, duration, name, attributes] = span;
  const from = x(Math.max(0, start));
  const to = x(Math.min(length, start + duration));
  const bar = svg(root, "rect", {
    class: `bar ${kindClass(name)}${isMissed(span) ? " missed" : ""}`,
    x: from,
    y: y + 0.5,
    width: Math.max(1, to - from),
    height: laneHeight - 3,
    rx: 2,
  });
  bar.span = span;
  bar.rank = rank;
  const label = name === "exchange" ? partnersText(attributes) : name;
  if (to - from > 6.2 * label.length + 8) {
    svg(root, "text", { class: "bar-name", x: from + 4, y: y + 12 }, label);
  }
}

// The other ends of an exchange: the same round and bucket at the ranks it names.
function partnersOf(root, bar) {
  const { round, bucket, send_to, recv_from } = bar.span[3];
  if (bar.span[2] !== "exchange" || round === undefined) return [];
  return [...root.querySelectorAll(".bar.exchange")].filter(
    ({ rank, span }) =>
      (rank === send_to || rank === recv_from) && span[3].round === round && span[3].bucket === bucket,
  );
}

function mountTimeline(box, spec) {
  const legendBox = document.querySelector(".timeline-legend");
  const names = new Set(spec.ranks.flatMap((r) => r.lanes.flatMap((l) => l.spans.map((s) => s[2]))));
  for (const name of names) {
    const item = html(legendBox, "li");
    const mark = svg(item, "svg", { viewBox: "0 0 18 10", "aria-hidden": "true" });
    svg(mark, "rect", { class: kindClass(name), width: 18, height: 10, rx: 2 });
    item.append(name);
  }
  if (spec.ranks.some((r) => r.lanes.some((l) => l.spans.some(isMissed)))) {
    const item = html(legendBox, "li");
    const mark = svg(item, "svg", { viewBox: "-1 -1 20 12", "aria-hidden": "true" });
    svg(mark, "rect", { class: "missed", width: 18, height: 10, rx: 2 });
    item.append("exchange not delivered");
  }
  const unmark = () => box.querySelectorAll(".partner").forEach((bar) => bar.classList.remove("partner"));
  const point = (event) => {
    unmark();
    const bar = event.target.closest(".bar");
    if (!bar) return hideTooltip();
    const [, duration, name, attributes] = bar.span;
    const rows = Object.entries(attributes).map(([key, value]) => [key, attributeText(key, value)]);
    for (const partner of partnersOf(box, bar)) partner.classList.add("partner");
    showTooltip(`rank ${bar.rank}: ${name}, ${microseconds(duration)}`, rows, event.clientX, event.clientY);
  };
  box.addEventListener("pointermove", point);
  box.addEventListener("pointerdown", point);
  box.addEventListener("pointerleave", () => {
    unmark();
    hideTooltip();
  });
  drawToFit(box, (width) => drawTimeline(box, spec, width));
}

if (data.timeline) mountTimeline(document.querySelector(".timeline"), data.timeline);
