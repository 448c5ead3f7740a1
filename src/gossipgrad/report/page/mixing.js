// Who met whom: one square a pair of ranks, beside what the schedule says.

const imageMargin = { top: 34, left: 40 };
const nobody = -1;

// How the first values of all ranks are mixed after `count` rounds: row i is rank i's value.
function mixingProduct(rounds, count, size) {
  let product = Array.from({ length: size }, (_, i) => Float64Array.from({ length: size }, (_, j) => +(i === j)));
  for (const from of rounds.slice(0, count)) {
    product = product.map((row, i) =>
      from[i] === nobody ? row : row.map((value, j) => (value + product[from[i]][j]) / 2),
    );
  }
  return product;
}

// The share that is left of the consensus distance of values that start independent.
function distanceLeft(product) {
  const size = product.length;
  if (size < 2) return 0;
  const square = product.reduce((sum, row) => sum + row.reduce((s, v) => s + (v - 1 / size) ** 2, 0), 0);
  return Math.sqrt(square / (size - 1));
}

function meetings(rounds, size) {
  const counts = Array.from({ length: size }, () => new Float64Array(size));
  for (const from of rounds) {
    from.forEach((other, rank) => {
      if (other !== nobody) counts[rank][other] += 1;
    });
  }
  return counts;
}

function rampColour(stops, share) {
  const at = clamp(share, 0, 1) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (at - low)));
}

function drawImage(canvas, image, width) {
  const size = image.values.length;
  const scale = window.devicePixelRatio || 1;
  const side = Math.min(width, 340) - imageMargin.left - 2;
  canvas.width = Math.round((side + imageMargin.left + 2) * scale);
  canvas.height = Math.round((side + imageMargin.top + 2) * scale);
  canvas.style.width = `${side + imageMargin.left + 2}px`;
  canvas.style.height = `${side + imageMargin.top + 2}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const stops = ["--heat-0", "--heat-1", "--heat-2"].map(colourOf);
  const none = `rgb(${colourOf("--heat-none")})`;
  const cell = side / size;
  const gap = cell >= 8 ? 1 : 0;
  for (let i = 0; i < size; i++) {
    for (let j = 0; j < size; j++) {
      const silent = image.silent.includes(i);
      context.fillStyle = silent ? none : `rgb(${rampColour(stops, image.values[i][j] / (image.most || 1))})`;
      context.fillRect(imageMargin.left + j * cell, imageMargin.top + i * cell, cell - gap, cell - gap);
    }
  }
  context.fillStyle = `rgb(${colourOf("--muted")})`;
  context.font = "11px system-ui, sans-serif";
  const every = ticks(0, size, Math.min(size, side / 28)).filter(Number.isInteger);
  for (const rank of every.filter((r) => r < size)) {
    context.textAlign = "center";
    context.fillText(rank, imageMargin.left + (rank + 0.5) * cell, imageMargin.top - 5);
    context.textAlign = "right";
    context.fillText(rank, imageMargin.left - 5, imageMargin.top + (rank + 0.5) * cell + 4);
  }
  context.textAlign = "left";
  context.fillText("from rank", imageMargin.left, 11);
  context.save();
  context.translate(11, imageMargin.top);
  context.rotate(Math.PI / 2);
  context.fillText("at rank", 0, 0);
  context.restore();
  return { side, cell };
}

function mountImage(parent, title) {
  const figure = html(parent, "figure");
  const scale = html(html(figure, "figcaption", title), "span", "", { class: "scale" });
  const canvas = html(figure, "canvas", "", { role: "img", tabindex: 0 });
  let image = null;
  let shape = null;
  let at = [0, 0];

  function read(i, j) {
    const size = image.values.length;
    at = [clamp(i, 0, size - 1), clamp(j, 0, size - 1)];
    const frame = canvas.getBoundingClientRect();
    const x = frame.left + imageMargin.left + (at[1] + 0.5) * shape.cell;
    const y = frame.top + imageMargin.top + (at[0] + 0.5) * shape.cell;
    const silent = image.silent.includes(at[0]);
    const rows = silent ? [["no trace", ""]] : [[image.what, image.write(image.values[at[0]][at[1]])]];
    showTooltip(`rank ${at[0]} from rank ${at[1]}`, rows, x, y);
  }

  onPointing(
    canvas,
    (event) => {
      const frame = canvas.getBoundingClientRect();
      const j = Math.floor((event.clientX - frame.left - imageMargin.left) / shape.cell);
      const i = Math.floor((event.clientY - frame.top - imageMargin.top) / shape.cell);
      if (i < 0 || j < 0) hideTooltip();
      else read(i, j);
    },
    hideTooltip,
  );
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    read(at[0] + move[0], at[1] + move[1]);
  });
  return {
    draw(next, width) {
      image = next;
      shape = drawImage(canvas, image, width);
      scale.replaceChildren("0");
      html(scale, "span", "", { class: "ramp" });
      scale.append(image.write(image.most));
      canvas.setAttribute("aria-label", `${title}. Arrow keys read the squares.`);
    },
  };
}

function mountMixing(box, specs) {
  let spec = specs[0];
  let count = 1;
  const bar = html(box, "div", "", { class: "controls" });
  const names = specs.map(({ run }) => run);
  if (specs.length > 1) choice(bar, "Run", names, 0, (index) => begin(specs[index]));
  const label = html(bar, "label", "Rounds mixed ");
  const slider = html(label, "input", "", { type: "range", min: 1, step: 1 });
  const output = html(bar, "output", "", { "aria-live": "polite" });
  const images = html(box, "div", "", { class: "images" });
  const met = mountImage(images, "Exchanges taken, all rounds");
  const seen = mountImage(images, "Mixed, as the trace shows");
  const told = mountImage(images, "Mixed, as the schedule says");

  function draw(width) {
    const { worldSize: size, silent, observed, expected } = spec;
    const most = Math.max(1, observed.length);
    const narrow = width < 720;
    const each = narrow ? width : Math.floor((width - 32) / 3);
    const counts = meetings(observed, size);
    const times = (value) => `${words(value)} of ${most} rounds`;
    const largest = Math.max(...counts.map((row) => Math.max(...row)));
    met.draw({ values: counts, most: largest, silent, what: "taken in", write: times }, each);
    const product = mixingProduct(observed, count, size);
    const plan = expected && mixingProduct(expected, count, size);
    const seenRows = product.filter((_, rank) => !silent.includes(rank));
    const top = Math.max(0, ...[...seenRows, ...(plan ?? [])].map((row) => Math.max(...row)));
    const share = { most: top, what: "share", write: percent };
    seen.draw({ values: product, silent, ...share }, each);
    images.lastChild.hidden = !plan;
    if (plan) told.draw({ values: plan, silent: [], ...share }, each);
    const last = spec.firstRound + count - 1;
    const which = count === 1 ? `round ${last}` : `rounds ${spec.firstRound} to ${last}`;
    const left = `${percent(distanceLeft(product))} of the consensus distance left`;
    const beside = plan ? `, by the schedule ${percent(distanceLeft(plan))}` : "";
    output.textContent = `${count} (${which}): ${left}${beside}`;
  }

  const again = drawToFit(box, (width) => draw(width));

  function begin(next) {
    spec = next;
    document.querySelector(".mixing-about").textContent = spec.about;
    slider.max = spec.observed.length;
    // A whole period mixes all: the round before shows how it comes about.
    count = clamp((spec.period ?? 2) - 1, 1, spec.observed.length);
    slider.value = count;
    again();
  }

  slider.addEventListener("input", () => {
    count = Number(slider.value);
    again();
  });
  begin(spec);
}

if (data.mixings.length) mountMixing(document.querySelector(".mixing"), data.mixings);
