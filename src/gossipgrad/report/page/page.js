// What all drawings share: SVG elements, axes, words for numbers, the tooltip, the theme.

const data = JSON.parse(document.getElementById("data").textContent);
const svgNamespace = document.getElementById("svg").namespaceURI;
const tooltip = document.getElementById("tooltip");
// Drawings that must be made again when the theme or the axis changes.
const redraws = [];

function svg(parent, tag, attributes = {}, text = "") {
  const node = document.createElementNS(svgNamespace, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== "") node.textContent = text;
  parent.append(node);
  return node;
}

function html(parent, tag, text = "", attributes = {}) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  parent.append(node);
  return node;
}

function button(parent, text, label, press) {
  const node = html(parent, "button", text, { type: "button", "aria-label": label });
  node.addEventListener("click", press);
  return node;
}

// A choice with a label before it; calls pick(index).
function choice(parent, label, options, chosen, pick) {
  const box = html(parent, "label", `${label} `);
  const select = html(box, "select");
  options.forEach((text, index) => {
    html(select, "option", text, { value: index }).selected = index === chosen;
  });
  select.addEventListener("change", () => pick(select.selectedIndex));
  return select;
}

function words(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 7 : 4 });
}

function percent(value) {
  return `${(100 * value).toLocaleString("en", { maximumFractionDigits: 2 })}%`;
}

function microseconds(value) {
  return value < 1000 ? `${words(value)} us` : `${words(value / 1000)} ms`;
}

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}

// Round values that divide [low, high] into about `count` parts.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

// Powers of ten in [low, high], with their twos and fives where the powers alone are too few.
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of [1, 2, 5]) found.push(Number((factor * 10 ** power).toPrecision(12)));
  }
  const inside = found.filter((value) => value >= low && value <= high);
  return inside.length <= 7 ? inside : inside.filter((value) => /^[1.0e+-]+$/.test(String(value)));
}

// Marks of an axis as text: as many digits as tell one from the next.
function markTexts(marks, isShare) {
  const step = Math.min(...marks.slice(1).map((mark, i) => mark - marks[i]), Infinity);
  const size = Math.max(...marks.map(Math.abs));
  if (!Number.isFinite(step)) return marks.map(isShare ? percent : words);
  const decimals = clamp(Math.ceil(-Math.log10(isShare ? 100 * step : step) - 1e-9) + 1, 0, 15);
  if (isShare) return marks.map((v) => `${(100 * v).toLocaleString("en", { maximumFractionDigits: decimals })}%`);
  if (size < 1e6 && size >= 1e-3) return marks.map((v) => v.toLocaleString("en", { maximumFractionDigits: decimals }));
  const digits = clamp(Math.ceil(Math.log10(size / step)) + 1, 1, 10);
  return marks.map((v) => (v === 0 ? "0" : v.toExponential(digits).replace(/\.?0*e/, "e")));
}

// A title and rows of [name, value], beside the point (x, y) of the viewport.
function showTooltip(title, rows, x, y) {
  tooltip.replaceChildren();
  html(tooltip, "strong", title);
  const table = html(tooltip, "table");
  for (const [name, value] of rows) {
    const row = html(table, "tr");
    html(row, "th", name).scope = "row";
    html(row, "td", value);
  }
  tooltip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const room = document.documentElement.clientWidth;
  const left = x + 14 + width < room ? x + 14 : Math.max(4, x - 14 - width);
  const top = clamp(y - height / 2, 4, Math.max(4, window.innerHeight - height - 4));
  tooltip.style.left = `${left + window.scrollX}px`;
  tooltip.style.top = `${top + window.scrollY}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

// Calls point(event) while something points at the node, leave() when nothing does any more. A
// finger that is lifted still reads what it has pointed at, until it touches elsewhere.
function onPointing(node, point, leave) {
  node.addEventListener("pointermove", point);
  node.addEventListener("pointerdown", point);
  node.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") leave();
  });
  node.addEventListener("blur", leave);
  document.addEventListener("pointerdown", (event) => {
    if (!node.contains(event.target)) leave();
  });
}

// Calls draw(width) now, whenever the box gets another width, and on every redraw.
function drawToFit(box, draw) {
  let drawn = 0;
  const fit = () => {
    const width = Math.floor(box.clientWidth);
    if (width > 0 && width !== drawn) draw((drawn = width));
  };
  fit();
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(box);
  const again = () => {
    if (drawn > 0) draw(drawn);
  };
  redraws.push(again);
  return again;
}

function redrawAll() {
  hideTooltip();
  for (const redraw of redraws) redraw();
}

// What a colour of the style sheet is in the theme of the moment, as [red, green, blue].
function colourOf(name) {
  const probe = html(document.body, "span");
  probe.style.color = `var(${name})`;
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color.match(/[\d.]+/g).slice(0, 3).map(Number);
}

const themes = ["system", "light", "dark"];

function applyTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  redrawAll();
}

// A page opened from a file may be denied a memory.
function remembered(theme) {
  try {
    if (theme) localStorage.setItem("gossipgrad-theme", theme);
    return localStorage.getItem("gossipgrad-theme");
  } catch {
    return null;
  }
}

document.querySelector(".toolbar").hidden = false;
document.getElementById("theme").addEventListener("click", () => {
  const now = themes.indexOf(document.documentElement.dataset.theme ?? "system");
  const next = themes[(now + 1) % themes.length];
  remembered(next);
  applyTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTooltip();
});
applyTheme(themes.includes(remembered()) ? remembered() : "system");
