// Steps of all ranks: what each worked at, and what was on its way meanwhile. The view moves over
// the part of the trace that the page holds.

const laneHeight = 18;
const rankGap = 28;
const axisHeight = 38;
const rightMargin = 12;
const firstRanks = 4;
const shortestView = 50;
const knownNames = new Set([
  "forward", "backward", "optimizer", "data", "evaluate",
  "exchange", "wait", "mix", "snapshot", "select", "average", "shuffle",
]);

function kindClass(name) {
  return knownNames.has(name) ? name : "other";
}

function attributeText(name, value) {
  if (name === "bytes" && typeof value === "number") return `${value.toLocaleString("en")} bytes`;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function isMissed(name, { outcome }) {
  return name === "exchange" && outcome !== undefined && outcome !== "delivered";
}

function partnersText({ send_to: to, recv_from: from }) {
  if (to === from) return to == null ? "exchange" : `with ${to}`;
  return [to == null ? "" : `to ${to}`, from == null ? "" : `from ${from}`].filter(Boolean).join(", ");
}

function laneText(name, narrow) {
  const text = name.replace(/^exchange, /, "");
  return narrow ? text.replace("communication", "comm.") : text;
}

function drawTimeAxis(root, spec, view, place, height) {
  const { x, left, right } = place;
  const [from, to] = view;
  const marks = ticks(from / 1000, to / 1000, (right - left) / 90);
  const decimals = Math.max(0, ...marks.map((mark) => (String(mark).split(".")[1] || "").length));
  for (const mark of marks) {
    svg(root, "path", { class: "grid", d: `M${x(1000 * mark)} ${axisHeight}V${height}` });
    const at = clamp(x(1000 * mark), left + 20, right - 20);
    svg(root, "text", { class: "middle", x: at, y: 12 }, `${mark.toFixed(decimals)} ms`);
  }
  let taken = -Infinity;
  for (const [number, start] of spec.steps) {
    if (start < from || start > to) continue;
    svg(root, "path", { class: "step-start", d: `M${x(start)} ${axisHeight - 8}V${height}` });
    if (x(start) < taken + 52 || x(start) > right - 44) continue;
    taken = x(start);
    svg(root, "text", { x: taken + 3, y: axisHeight - 8 }, `step ${number}`);
  }
}

function drawLane(root, spec, rank, lane, view, x, y) {
  const [from, to] = view;
  let drawnTo = -Infinity;
  for (const [start, duration, nameIndex, attributes] of lane.spans) {
    if (start >= to || start + Math.max(duration, 0.05) <= from) continue;
    const left = x(Math.max(from, start));
    const right = x(Math.min(to, start + duration));
    // Of many within one pixel the first is enough.
    if (right - left < 0.5 && right < drawnTo + 0.5) continue;
    drawnTo = right;
    const name = spec.names[nameIndex];
    const missed = isMissed(name, attributes);
    const bar = svg(root, "rect", {
      class: `bar ${kindClass(name)}${missed ? " missed" : ""}`,
      x: left,
      y: y + 0.5,
      width: Math.max(1, right - left),
      height: laneHeight - 3,
      rx: Math.min(2, (right - left) / 4),
    });
    bar.rank = rank;
    bar.span = { name, duration, attributes };
    const label = name === "exchange" ? partnersText(attributes) : name;
    if (right - left > 6.2 * label.length + 8) {
      svg(root, "text", { class: `bar-name ${missed ? "on-missed" : ""}`, x: left + 4, y: y + 12 }, label);
    }
  }
}

function drawTimeline(root, spec, view, ranks, width) {
  root.replaceChildren();
  const narrow = width < 560;
  const left = narrow ? 62 : 112;
  const right = width - rightMargin;
  const x = (t) => left + ((right - left) * (t - view[0])) / (view[1] - view[0]);
  const lanes = ranks.reduce((sum, rank) => sum + rank.lanes.length, 0);
  const height = axisHeight + ranks.length * rankGap + lanes * laneHeight + 4;
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("height", height);
  drawTimeAxis(root, spec, view, { x, left, right }, height);
  let y = axisHeight;
  for (const rank of ranks) {
    svg(root, "text", { class: "rank-name", x: 0, y: y + 19 }, `rank ${rank.rank}`);
    y += rankGap;
    for (const lane of rank.lanes) {
      svg(root, "text", { x: narrow ? 0 : 10, y: y + 13 }, laneText(lane.name, narrow));
      svg(root, "rect", { class: "row", x: left, y, width: right - left, height: laneHeight - 2 });
      drawLane(root, spec, rank.rank, lane, view, x, y);
      y += laneHeight;
    }
  }
  return { left, right };
}

// The other ends of an exchange: the same round and bucket at the ranks it names.
function partnersOf(root, bar) {
  const { round, bucket, send_to, recv_from } = bar.span.attributes;
  if (bar.span.name !== "exchange" || round === undefined) return [];
  return [...root.querySelectorAll(".bar.exchange")].filter(
    ({ rank, span: { attributes } }) =>
      (rank === send_to || rank === recv_from) && attributes.round === round && attributes.bucket === bucket,
  );
}

function timelineLegend(list, spec) {
  list.replaceChildren();
  const mark = (shown, name) => {
    const item = html(list, "li");
    const box = svg(item, "svg", { viewBox: "-1 -1 20 12", "aria-hidden": "true" });
    svg(box, "rect", { class: shown, width: 18, height: 10, rx: 2 });
    item.append(name);
  };
  for (const name of spec.names) mark(kindClass(name), name);
  const spans = spec.ranks.flatMap((rank) => rank.lanes.flatMap((lane) => lane.spans));
  if (spans.some((span) => isMissed(spec.names[span[2]], span[3]))) mark("missed", "not delivered");
}

function mountTimeline(box, specs) {
  let spec = specs[0];
  let view = [0, 1];
  let place = { left: 0, right: 1 };
  const bar = html(box, "div", "", { class: "controls" });
  const legendList = html(box, "ul", "", { class: "legend" });
  if (specs.length > 1) choice(bar, "Run", specs.map(({ run }) => run), 0, (i) => begin(specs[i]));
  const stepLabel = html(bar, "label", "From step ");
  const step = html(stepLabel, "input", "", { type: "number", class: "step" });
  const counts = [1, 3, 5, 10];
  const count = choice(bar, "show", [...counts.map((n) => `${n} step${n > 1 ? "s" : ""}`), "all"], 1, showSteps);
  const group = html(bar, "span", "", { class: "buttons" });
  button(group, "\u2190", "Earlier", () => pan(-0.5));
  button(group, "\u2192", "Later", () => pan(0.5));
  button(group, "+", "Zoom in", () => zoom(0.5));
  button(group, "\u2212", "Zoom out", () => zoom(2));
  let ranks = null;
  const most = Math.max(...specs.map((each) => each.ranks.length));
  if (most > firstRanks) {
    ranks = choice(bar, "Ranks", [`first ${firstRanks}`, "all"], 0, () => again());
  }
  const label =
    "Timeline. Left and right move, plus and minus zoom; the times by rank are in the table below.";
  const root = svg(box, "svg", { role: "img", tabindex: 0, "aria-label": label });

  function look(from, to) {
    const span = clamp(to - from, Math.min(shortestView, spec.length), spec.length);
    const start = clamp(from, 0, spec.length - span);
    view = [start, start + span];
    hideTooltip();
    again();
  }
  function pan(share) {
    const by = share * (view[1] - view[0]);
    look(view[0] + by, view[1] + by);
  }
  function zoom(factor, at = (view[0] + view[1]) / 2) {
    look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  }
  function showSteps() {
    if (!spec.steps.length || count.selectedIndex === counts.length) return look(0, spec.length);
    const wanted = spec.steps.findIndex(([number]) => number >= Number(step.value));
    const first = wanted < 0 ? spec.steps.length - 1 : wanted;
    const last = Math.min(spec.steps.length, first + counts[count.selectedIndex]) - 1;
    look(spec.steps[first][1], spec.steps[last][2]);
  }
  function begin(next) {
    spec = next;
    document.querySelector(".timeline-about").textContent = spec.about;
    timelineLegend(legendList, spec);
    stepLabel.hidden = count.parentNode.hidden = !spec.steps.length;
    if (spec.steps.length) {
      step.min = spec.steps[0][0];
      step.max = spec.steps[spec.steps.length - 1][0];
      step.value = spec.steps.find(([, start]) => start >= spec.shown[0])[0];
    }
    count.selectedIndex = 1;
    look(...spec.shown);
  }

  const again = drawToFit(box, (width) => {
    const shown = !ranks || ranks.selectedIndex === 1 ? spec.ranks : spec.ranks.slice(0, firstRanks);
    place = drawTimeline(root, spec, view, shown, width);
  });
  step.addEventListener("change", showSteps);
  root.addEventListener("wheel", (event) => {
    // The wheel alone scrolls the page.
    if (!event.ctrlKey) return;
    event.preventDefault();
    const share = (event.clientX - root.getBoundingClientRect().left - place.left) / (place.right - place.left);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, view[0] + clamp(share, 0, 1) * (view[1] - view[0]));
  }, { passive: false });
  root.addEventListener("keydown", (event) => {
    const act = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "-": () => zoom(2),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  let dragged = null;
  const unmark = () => root.querySelectorAll(".partner").forEach((each) => each.classList.remove("partner"));
  root.addEventListener("pointerdown", (event) => {
    dragged = { x: event.clientX, view };
    root.setPointerCapture(event.pointerId);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    root.addEventListener(end, () => {
      dragged = null;
    });
  }
  const leave = () => {
    unmark();
    hideTooltip();
  };
  const point = (event) => {
    if (dragged && event.type === "pointermove") {
      const by = ((dragged.x - event.clientX) * (view[1] - view[0])) / (place.right - place.left);
      return look(dragged.view[0] + by, dragged.view[1] + by);
    }
    unmark();
    const under = document.elementFromPoint(event.clientX, event.clientY)?.closest(".bar");
    if (!under || !root.contains(under)) return hideTooltip();
    const { name, duration, attributes } = under.span;
    const rows = Object.entries(attributes).map(([key, value]) => [key, attributeText(key, value)]);
    for (const partner of partnersOf(root, under)) partner.classList.add("partner");
    showTooltip(`rank ${under.rank}: ${name}, ${microseconds(duration)}`, rows, event.clientX, event.clientY);
    return undefined;
  };
  onPointing(root, point, leave);
  begin(spec);
}

if (data.timelines.length) mountTimeline(document.querySelector(".timeline"), data.timelines);
