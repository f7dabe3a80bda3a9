"use strict";
// Curves as inline SVG, redrawn on resize; the legend shows the values under the pointer.

const HEIGHT = 170;
const MARGIN = {top: 8, right: 8, bottom: 34, left: 46};
const COLOURS = 8;

/** Returns an element with properties and children; strings become text nodes, never HTML. */
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name.includes("-") || name === "scope") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Returns a number with three significant digits, a whole one with all. */
function short(value) {
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** Returns about `wanted` round numbers from low to high for an axis. */
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const values = [];
  for (let number = first; number * step <= high + step * 1e-6; number += 1) {
    values.push(Number((number * step).toPrecision(12)));
  }
  return values;
}

/** Returns the panel's series with points [x, y, base]; in a stack each series is on top of the previous ones. */
function layers(panel) {
  if (panel.kind !== "stack") {
    return panel.series.map((series) => ({...series, drawn: series.points.map(([x, y]) => [x, y, 0])}));
  }
  const ground = new Map();
  return panel.series.map((series) => ({...series, drawn: series.points.map(([x, y]) => {
    const from = ground.get(x) || 0;
    ground.set(x, from + y);
    return [x, from + y, from];
  })}));
}

/** Returns the runs of points between gaps, which are values that were not finite. */
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] === null) found.push([]);
    else found[found.length - 1].push(point);
  }
  return found.filter((run) => run.length);
}

function range(values, zero) {
  let low = Math.min(...values, ...(zero ? [0] : []));
  let high = Math.max(...values, ...(zero ? [0] : []));
  if (!values.length) [low, high] = [0, 1];
  // What is equal but for rounding has no marks in between that a number could have.
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) [low, high] = zero && low === 0 ? [0, 1] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  return [low, high];
}

function drawPanel(panel) {
  const legend = make("ul", {class: "legend"});
  const svg = shape("svg", {role: "img", "aria-label": panel.title, height: HEIGHT});
  const unit = panel.unit ? ` (${panel.unit})` : "";
  const box = make("div", {class: "panel"},
    make("h3", {}, panel.title + unit), make("div", {class: "help"}, panel.help), legend, svg);
  const drawn = layers(panel);
  const steps = [...new Set(drawn.flatMap((series) => series.drawn.map(([x]) => x)))].sort((a, b) => a - b);
  const values = drawn.flatMap((series) => series.drawn.map(([, y]) => y)).filter((y) => y !== null);
  let [low, high] = range(values, panel.zero);
  const marks = ticks(low, high, 4);
  const gap = marks.length > 1 ? marks[1] - marks[0] : 1;
  low = Math.min(low, Math.floor(low / gap + 1e-9) * gap);
  high = Math.max(high, Math.ceil(high / gap - 1e-9) * gap);

  function name(step) {
    legend.replaceChildren(...drawn.map((series) => {
      const point = step === null ? null : series.points.find(([x]) => x === step);
      const value = point ? make("b", {}, point[1] === null ? "not finite" : short(point[1])) : "";
      return make("li", {}, make("span", {class: `swatch fill${series.colour % COLOURS}`}), series.name, value);
    }), ...(step === null ? [] : [make("li", {class: "note"}, `at step ${short(step)}`)]));
  }

  function draw() {
    const width = Math.max(220, svg.clientWidth || 300);
    const [left, right] = [steps[0], steps[steps.length - 1]];
    const x = (step) => MARGIN.left
      + (right > left ? (step - left) / (right - left) : 0.5) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => HEIGHT - MARGIN.bottom
      - (value - low) / (high - low) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren();
    for (const mark of ticks(low, high, 4)) {
      svg.append(shape("line", {class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(mark), y2: y(mark)}));
      svg.append(shape("text", {x: MARGIN.left - 6, y: y(mark) + 4, "text-anchor": "end"}, short(mark)));
    }
    const whole = right > left ? ticks(left, right, Math.min(6, width / 60)).filter(Number.isInteger) : [left];
    for (const mark of whole) {
      svg.append(shape("text", {x: x(mark), y: HEIGHT - MARGIN.bottom + 15, "text-anchor": "middle"}, mark));
    }
    const ground = HEIGHT - MARGIN.bottom;
    svg.append(shape("line", {class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: ground, y2: ground}));
    svg.append(shape("text", {x: (MARGIN.left + width) / 2, y: HEIGHT - 4, "text-anchor": "middle"}, "step"));
    for (const series of drawn) {
      const colour = series.colour % COLOURS;
      for (const run of runs(series.drawn)) {
        const line = run.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
        if (panel.kind === "stack" && run.length > 1) {
          const back = run.map(([step, , from]) => `${x(step).toFixed(1)},${y(from).toFixed(1)}`).reverse();
          svg.append(shape("polygon", {class: `area fill${colour}`, points: [...line, ...back].join(" "), "fill-opacity": 0.85}));
        } else {
          svg.append(shape("polyline", {class: `curve stroke${colour}`, points: line.join(" "), "data-series": series.name}));
        }
        if (run.length === 1 || run.length * 12 < width && panel.kind !== "stack") {
          for (const [step, value] of run) {
            svg.append(shape("circle", {class: `point fill${colour}`, cx: x(step), cy: y(value), r: 2.5}));
          }
        }
      }
    }
    const cursor = shape("line", {class: "cursor", y1: MARGIN.top, y2: ground, visibility: "hidden"});
    svg.append(cursor);
    svg.onpointermove = (event) => {
      const place = (event.clientX - svg.getBoundingClientRect().left) * width / svg.clientWidth;
      const step = steps.reduce((best, next) => Math.abs(x(next) - place) < Math.abs(x(best) - place) ? next : best);
      cursor.setAttribute("x1", x(step));
      cursor.setAttribute("x2", x(step));
      cursor.setAttribute("visibility", "visible");
      name(step);
    };
    svg.onpointerleave = () => {
      cursor.setAttribute("visibility", "hidden");
      name(null);
    };
  }

  name(null);
  new ResizeObserver(draw).observe(svg);
  return box;
}
