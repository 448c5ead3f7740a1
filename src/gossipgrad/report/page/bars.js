// Stacked bars: a row for each rank or run, its parts side by side.

const barHeight = 16;
const barGap = 8;
const noteWidth = 128;

function barClass(spec, kind) {
  // Kinds that the style sheet does not know, outcomes of later versions, look alike.
  const known = ["delivered", "late", "dead_peer", "void", "exchanges", "shuffle", "reference", "rate"];
  if (spec.id === "lateness") return `late-${Object.keys(spec.kinds).indexOf(kind)}`;
  return known.includes(kind) ? `part-${kind}` : "part-other";
}

function drawBars(root, spec, width) {
  root.replaceChildren();
  // A narrow screen has the label above its bar, a wide one beside it.
  const narrow = width < 420;
  const longest = Math.max(...spec.bars.map(({ label }) => label.length)) * 6.6 + 12;
  const labelWidth = narrow ? 0 : clamp(longest, 60, 0.34 * width);
  const rowHeight = barHeight + barGap + (narrow ? 16 : 0);
  const height = spec.bars.length * rowHeight;
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("height", height);
  const room = Math.max(40, width - labelWidth - noteWidth);
  const totals = spec.bars.map(({ parts }) => Object.values(parts).reduce((a, b) => a + b, 0));
  const largest = Math.max(...totals) || 1;
  spec.bars.forEach((bar, index) => {
    const top = index * rowHeight + barGap / 2;
    const y = top + (narrow ? 16 : 0);
    const labelRoom = narrow ? width : labelWidth;
    svg(root, "text", { x: 0, y: top + 12 }, shortened(bar.label, labelRoom));
    const row = svg(root, "g", { class: `bar-row ${bar.reference ? "reference" : ""}` });
    row.bar = bar;
    svg(row, "rect", { class: "bar-back", x: labelWidth, y, width: room, height: barHeight, rx: 2 });
    if (!totals[index]) {
      const missing = Object.keys(bar.parts).length ? "none" : "missing";
      svg(root, "text", { class: "bar-note", x: labelWidth + 6, y: y + 12 }, missing);
      return;
    }
    const unit = room / (spec.ofWhole ? totals[index] : largest);
    let x = labelWidth;
    for (const kind of Object.keys(spec.kinds)) {
      const value = bar.parts[kind];
      if (!value) continue;
      // What there is can be seen, however little.
      const length = Math.min(Math.max(2, value * unit), labelWidth + room - x);
      svg(row, "rect", { class: `part ${barClass(spec, kind)}`, x, y, width: length, height: barHeight });
      x += length;
    }
    svg(root, "text", { class: "bar-note", x: labelWidth + room + 8, y: y + 12 }, bar.note);
  });
}

function barRows(spec, { parts }) {
  const total = Object.values(parts).reduce((a, b) => a + b, 0);
  const write = spec.format === "bytes" ? byteCount : (value) => words(Number(value.toPrecision(6)));
  return Object.entries(spec.kinds)
    .filter(([kind]) => kind in parts)
    .map(([kind, name]) => {
      const share = spec.ofWhole && total ? ` (${percent(parts[kind] / total)})` : "";
      return [name, write(parts[kind]) + share];
    });
}

function mountBars(box, spec) {
  if (spec.ofWhole || Object.keys(spec.kinds).length > 1) {
    const list = html(box, "ul", "", { class: "legend" });
    for (const [kind, name] of Object.entries(spec.kinds)) {
      const item = html(list, "li");
      const mark = svg(item, "svg", { viewBox: "0 0 18 10", "aria-hidden": "true" });
      svg(mark, "rect", { class: `part ${barClass(spec, kind)}`, width: 18, height: 10, rx: 2 });
      item.append(name);
    }
  }
  const title = box.closest("figure").querySelector("h2").textContent;
  const label = `${title}. Up and down keys read the rows; they are in the table below, too.`;
  const root = svg(box, "svg", { role: "img", tabindex: 0, "aria-label": label });
  let at = -1;
  const show = (index, x, y) => {
    at = index;
    const bar = spec.bars[at];
    showTooltip(bar.label, barRows(spec, bar), x, y);
  };
  onPointing(
    root,
    (event) => {
      const frame = root.getBoundingClientRect();
      const index = Math.floor(((event.clientY - frame.top) / frame.height) * spec.bars.length);
      show(clamp(index, 0, spec.bars.length - 1), event.clientX, event.clientY);
    },
    () => {
      at = -1;
      hideTooltip();
    },
  );
  root.addEventListener("keydown", (event) => {
    const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const frame = root.getBoundingClientRect();
    const index = clamp(at + move, 0, spec.bars.length - 1);
    const y = frame.top + (frame.height * (index + 0.5)) / spec.bars.length;
    show(index, frame.left + frame.width / 2, y);
  });
  drawToFit(box, (width) => drawBars(root, spec, width));
}

for (const spec of data.bars) mountBars(document.querySelector(`[data-bars="${spec.id}"]`), spec);
