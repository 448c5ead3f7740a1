// What charts and timeline share: SVG elements, axes, words for numbers, the tooltip.

const data = JSON.parse(document.getElementById("data").textContent);
const svgNamespace = document.getElementById("svg").namespaceURI;
const tooltip = document.getElementById("tooltip");

function svg(parent, tag, attributes = {}, text = "") {
  const node = document.createElementNS(svgNamespace, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== "") node.textContent = text;
  parent.append(node);
  return node;
}

function html(parent, tag, text = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  parent.append(node);
  return node;
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

// Round values that divide [low, high] into about `count` parts.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw) * power;
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
  const top = Math.max(4, Math.min(y - height / 2, window.innerHeight - height - 4));
  tooltip.style.left = `${left + window.scrollX}px`;
  tooltip.style.top = `${top + window.scrollY}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

// Calls draw(width) now and whenever the box gets another width.
function drawToFit(box, draw) {
  let drawn = 0;
  const fit = () => {
    const width = Math.floor(box.clientWidth);
    if (width > 0 && width !== drawn) draw((drawn = width));
  };
  fit();
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(box);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTooltip();
});
