// Curves of several runs: panels with hover and run toggles, from plain data. The live page uses them too.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 3", "7 2 2 2", "2 2"];

function element(name, attributes, ...children) {
  const made = ["svg", "path", "text", "g", "circle", "line"].includes(name)
    ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function short(value) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

function ticks(low, high, log) {
  if (log) {
    const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
    const powers = Array.from({length: Math.max(last - first + 1, 0)}, (_, i) => 10 ** (first + i));
    return powers.length > 1 ? powers : [low, Math.sqrt(low * high), high];
  }
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find(times => times * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

function range(values, least) {
  let low = Math.min(...values), high = Math.max(...values);
  if (least !== null && least !== undefined) low = Math.max(low, least);
  if (high <= low) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
  return [low, high];
}

function swatch(run) {
  const line = {d: "M0 4H28", stroke: run.color, "stroke-width": 3, "stroke-dasharray": DASHES[run.dash]};
  return element("svg", {viewBox: "0 0 28 8", class: "swatch", "aria-hidden": "true"}, element("path", line));
}

// One panel: {title, log, least, series: [{run, x, y, faint}]}; `runs` is [{name, color, dash}], `shown` a set of names.
function panel(data, runs, shown) {
  const W = 420, H = 230, L = 52, R = 12, T = 10, B = 30;
  const series = data.series.filter(one => shown.has(one.run) && one.x.length);
  const box = element("div", {class: "panel"}, element("h4", {}, data.title));
  if (!series.length) { box.append(element("p", {class: "note"}, "nothing yet")); return box; }
  const [x0, x1] = range(series.flatMap(one => one.x).concat([0])), [y0, y1] = range(series.flatMap(one => one.y), data.least);
  const f = data.log ? Math.log10 : (value => value);
  const X = at => L + (W - L - R) * (at - x0) / (x1 - x0);
  const Y = at => Math.min(H - B, H - B - (H - B - T) * (f(at) - f(y0)) / (f(y1) - f(y0)));
  const last = series.map(one => `${one.run} ${short(one.y[one.y.length - 1])}`).join(", ");
  const svg = element("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${data.title}, last values: ${last}`});
  for (const at of ticks(y0, y1, data.log)) {
    svg.append(element("line", {class: "grid", x1: L, x2: W - R, y1: Y(at), y2: Y(at)}));
    svg.append(element("text", {x: L - 6, y: Y(at) + 4, "text-anchor": "end"}, short(at)));
  }
  for (const at of ticks(x0, x1)) svg.append(element("text", {x: X(at), y: H - 10, "text-anchor": "middle"}, short(at)));
  for (const one of series) {
    const run = runs.find(run => run.name === one.run);
    const d = one.x.map((at, i) => `${i ? "L" : "M"}${X(at).toFixed(1)} ${Y(one.y[i]).toFixed(1)}`).join("");
    const look = {d, fill: "none", stroke: run.color, "stroke-width": one.faint ? 1 : 2, "stroke-dasharray": DASHES[run.dash]};
    svg.append(element("path", one.faint ? {...look, opacity: .45} : look));
    if (one.x.length === 1) svg.append(element("circle", {cx: X(one.x[0]), cy: Y(one.y[0]), r: 3.5, fill: run.color}));
  }
  const rule = element("line", {class: "rule", y1: T, y2: H - B, x1: -9, x2: -9}), tip = element("div", {class: "tip"});
  tip.hidden = true;
  svg.append(rule);
  svg.addEventListener("pointermove", event => {
    const frame = svg.getBoundingClientRect(), at = x0 + ((event.clientX - frame.left) / frame.width * W - L) / (W - L - R) * (x1 - x0);
    const lines = series.filter(one => !one.faint).map(one => {
      const i = one.x.reduce((best, x, i) => Math.abs(x - at) < Math.abs(one.x[best] - at) ? i : best, 0);
      return [one, i];
    });
    if (!lines.length) return;
    const x = X(lines[0][0].x[lines[0][1]]);
    rule.setAttribute("x1", x); rule.setAttribute("x2", x);
    tip.replaceChildren(`epoch ${short(lines[0][0].x[lines[0][1]])}`, ...lines.map(([one, i]) => {
      const mark = element("i", {class: "dot"});
      mark.style.background = runs.find(run => run.name === one.run).color;
      return element("div", {}, mark, runs.length > 1 ? `${one.run}: ` : "", element("b", {}, short(one.y[i])));
    }));
    tip.hidden = false;
    const left = event.clientX - box.getBoundingClientRect().left;
    tip.style.left = left > frame.width / 2 ? "auto" : `${left + 14}px`;
    tip.style.right = left > frame.width / 2 ? `${frame.width - left + 14}px` : "auto";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; rule.setAttribute("x1", -9); rule.setAttribute("x2", -9); });
  box.append(svg, tip);
  return box;
}

// All panels with a box to tick for every run; `shown` says which are ticked and outlives a redraw.
function curves(place, data, shown) {
  const grid = element("div", {class: "panels"});
  const draw = () => grid.replaceChildren(...data.panels.map(one => panel(one, data.runs, shown)));
  const names = data.runs.map(run => {
    const box = element("input", {type: "checkbox"});
    box.checked = shown.has(run.name);
    box.addEventListener("change", () => { box.checked ? shown.add(run.name) : shown.delete(run.name); draw(); });
    return element("label", {}, box, swatch(run), run.name);
  });
  const legend = element("div", {class: "toggles", role: "group", "aria-label": "Runs to show"}, ...names);
  place.replaceChildren(...(data.runs.length > 1 ? [legend] : []), grid);
  draw();
}
