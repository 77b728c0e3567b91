
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0));
const view = new DataView(bytes.buffer);
const kinds = data.tokens.length, heads = data.heads, layers = data.layers.length, steps = data.steps.length;
const offsets = [0];
for (let t = 0; t < steps; t++) {
  offsets.push(offsets[t] + layers * heads * (t + 1 - data.first[t]) * kinds);
}
const columns = Math.max(...data.first.map((first, t) => t + 1 - first));
let selected = 0;

/** Return an element with attributes and children; text is never parsed as HTML. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Return an SVG element with attributes. */
function drawn(name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const byId = (id) => document.getElementById(id);
const short = (number) => String(Number(number.toPrecision(4)));
const percent = (weight) => `${(100 * weight).toFixed(weight < 0.0995 ? 1 : 0)}%`;

/** Return the weights of a head at step t: an array over the tokens of the steps from data.first[t] to t. */
function headWeights(t, layer, head) {
  const size = (t + 1 - data.first[t]) * kinds;
  const start = offsets[t] + (layer * heads + head) * size;
  return Array.from({length: size}, (_, i) => view.getFloat32(4 * (start + i), true));
}

/** Return the mean of several rows of weights. */
function mean(rows) {
  return rows[0].map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
}

/** Return all rows at step t: the mean, then each head of each layer. */
function rowsAt(t) {
  const rows = [];
  for (let layer = 0; layer < layers; layer++) {
    for (let head = 0; head < heads; head++) rows.push(headWeights(t, layer, head));
  }
  return [mean(rows), ...rows];
}

function color(name) {
  const canvas = element("canvas", {width: 1, height: 1}).getContext("2d");
  canvas.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
}

/** Return the first step of the rows at step t: rows show as many steps as any step attends to. */
function firstShown(t) {
  return Math.max(0, t + 1 - columns);
}

/** Draw weights on a canvas with a column for each step and a line for each token of a step. */
function heat(canvas, weights, first, largest) {
  const context = canvas.getContext("2d"), [red, green, blue] = color("--heat");
  const image = context.createImageData(columns, kinds);
  weights.forEach((weight, i) => {
    const place = 4 * ((i % kinds) * columns + first - firstShown(selected) + Math.floor(i / kinds));
    image.data.set([red, green, blue, 255 * Math.sqrt(Math.max(0, weight) / largest)], place);
  });
  context.putImageData(image, 0, 0);
}

function tokenName(step, kind) {
  const name = step === selected ? `step ${step} (this step)` : `step ${step}`;
  return kinds === 1 ? name : `${name}, ${data.tokens[kind]}`;
}

/** Show the tokens with the largest weights, and the share of attention on other tokens. */
function showTop(box, weights, first) {
  const order = weights.map((_, i) => i).filter((i) => weights[i] > 0.005);
  order.sort((a, b) => weights[b] - weights[a]);
  const buttons = order.slice(0, 3).map((i) => {
    const step = first + Math.floor(i / kinds);
    const button = element("button", {type: "button"});
    if (data.frames[step]) button.append(element("img", {src: data.frames[step], alt: ""}));
    button.append(`${tokenName(step, i % kinds)}: ${percent(weights[i])}`);
    button.addEventListener("click", () => select(step));
    return button;
  });
  box.replaceChildren(...buttons);
  const rest = 1 - weights.reduce((sum, weight) => sum + weight, 0);
  if (rest > 0.005) box.append(element("span", {class: "rest"}, `${percent(rest)} is not on steps`));
}

/** Return the column, of some number of columns, at the horizontal position of a mouse event. */
function columnAt(event, count) {
  const box = event.currentTarget.getBoundingClientRect();
  return Math.floor((event.clientX - box.left) / box.width * count);
}

function addRow(parent, label) {
  const canvas = element("canvas", {width: columns, height: kinds, role: "img", class: kinds > 1 ? "tall" : ""});
  const here = element("span", {class: "here"}), top = element("div", {class: "top"});
  canvas.addEventListener("click", (event) => select(firstShown(selected) + columnAt(event, columns)));
  parent.append(element("div", {class: "row"}, element("span", {}, label),
    element("span", {class: "bar"}, canvas, here), top));
  return {label, canvas, here, top};
}

function buildRows() {
  const parent = byId("rows"), rows = [addRow(parent, "mean")];
  for (const layer of data.layers) {
    parent.append(element("h3", {}, `Layer ${layer}`));
    for (let head = 1; head <= heads; head++) rows.push(addRow(parent, `head ${head}`));
  }
  return rows;
}

/** Add a line chart of series over the steps; return a function that moves its cursor. */
function chart(parent, series, low, high, label) {
  const svg = drawn("svg", {class: "chart", viewBox: `0 0 ${steps} 100`, preserveAspectRatio: "none", role: "img"});
  svg.setAttribute("aria-label", label);
  const y = (value) => high === low ? 50 : 98 - 96 * (value - low) / (high - low);
  for (const edge of [low, high]) {
    svg.append(drawn("line", {class: "axis", x1: 0, x2: steps, y1: y(edge), y2: y(edge), "vector-effect": "non-scaling-stroke"}));
  }
  series.forEach((each, number) => {
    const points = each.values.map((value, t) => `${t + 0.5},${y(value)}`);
    const line = drawn("polyline", {points: points.length > 1 ? points.join(" ") : `0,${y(each.values[0])} 1,${y(each.values[0])}`});
    line.style.stroke = `var(${number ? "--second" : "--first"})`;
    svg.append(line);
  });
  const cursor = drawn("line", {class: "cursor", y1: 0, y2: 100});
  svg.append(cursor);
  svg.addEventListener("click", (event) => select(columnAt(event, steps)));
  parent.append(svg, element("div", {class: "range"}, element("span", {}, `step 0, from ${short(low)}`),
    element("span", {}, `to ${short(high)}, step ${steps - 1}`)));
  return (t) => { cursor.setAttribute("x1", t + 0.5); cursor.setAttribute("x2", t + 0.5); };
}

function buildReturns() {
  let sum = 0;
  const values = data.steps.map((step) => sum += step.reward);
  const move = chart(byId("returns"), [{values}], Math.min(0, ...values), Math.max(0, ...values), "return so far");
  return {values, move};
}

function buildGates() {
  const layersOfGates = [...new Set(data.gates.map((gate) => gate.layer))];
  byId("gating").hidden = !layersOfGates.length;
  return layersOfGates.flatMap((layer) => {
    const gates = data.gates.filter((gate) => gate.layer === layer), box = byId("gates");
    const key = element("div", {class: "key"});
    const labels = gates.map(() => element("b", {}));
    key.append(...labels.map((label) => element("span", {}, element("i"), label)));
    box.append(element("h3", {}, layer), key);
    const move = chart(box, gates, 0, 1, `gates of ${layer}`);
    return [(t) => { move(t); gates.forEach((gate, n) => labels[n].textContent = `${gate.name}: ${gate.values[t].toFixed(3)}`); }];
  });
}

function showDetails(t, returns) {
  const step = data.steps[t];
  const entries = [["action", step.action], ["reward", short(step.reward)], ["return so far", short(returns.values[t])]];
  if (data.returns_to_go) entries.push(["return-to-go", short(data.returns_to_go[t])]);
  entries.push(["observation", step.observation]);
  for (const [name, text] of Object.entries(step.info)) entries.push([`info: ${name}`, text]);
  byId("details").replaceChildren(...entries.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
  if (data.frames[t]) {
    byId("frame").src = data.frames[t];
    byId("frame").alt = `environment before step ${t}`;
  }
}

function select(step) {
  selected = Math.min(steps - 1, Math.max(0, step));
  byId("slider").value = selected;
  byId("position").textContent = `step ${selected} of ${steps - 1}`;
  showDetails(selected, returns);
  returns.move(selected);
  gates.forEach((show) => show(selected));
  const all = rowsAt(selected), largest = Math.max(1e-9, ...all.map((weights) => Math.max(...weights)));
  byId("shown").textContent = `Rows show the steps from ${firstShown(selected)} to ${firstShown(selected) + columns - 1}.`;
  all.forEach((weights, number) => {
    const {label, canvas, here, top} = rows[number], first = data.first[selected];
    heat(canvas, weights, first, largest);
    here.style.left = `${100 * (selected - firstShown(selected)) / columns}%`;
    here.style.width = `${Math.max(100 / columns, 0.5)}%`;
    showTop(top, weights, first);
    canvas.setAttribute("aria-label", `${label}: ${top.textContent}`);
  });
}

function addControls() {
  byId("slider").max = steps - 1;
  byId("slider").addEventListener("input", (event) => select(Number(event.target.value)));
  byId("previous").addEventListener("click", () => select(selected - 1));
  byId("next").addEventListener("click", () => select(selected + 1));
  document.addEventListener("keydown", (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -steps, End: steps}[event.key];
    if (move === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    select(selected + move);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => select(selected));
}

byId("title").textContent = data.title;
byId("summary").textContent = data.summary;
byId("notice").textContent = data.notice;
byId("notice").hidden = !data.notice;
byId("legend").textContent = data.legend;
const rows = buildRows(), returns = buildReturns(), gates = buildGates();
addControls();
select(Number((location.hash.match(/^#step=(\d+)$/) || [0, 0])[1]));
