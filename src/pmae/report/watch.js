// The live page: asks for the state of the runs every few seconds while it is looked at, and redraws what changed.
"use strict";
const EVERY = 4000, MOST = 8, MARKS = {training: "▶", finished: "✓", stopped: "◼", failed: "✗"};
const shown = new Set(), known = new Set();
let before = "";

function percent(value) { return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1).replace("-", "−")}%`; }

function duration(seconds) {
  if (seconds === null) return "–";
  const minutes = Math.round(seconds / 60);
  return seconds < 90 ? `${Math.round(seconds)} s` : minutes < 90 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}

function row(run, look, redraw) {
  const box = element("input", {type: "checkbox", "aria-label": `compare ${run.name}`});
  box.checked = shown.has(run.name);
  box.addEventListener("change", () => { box.checked ? shown.add(run.name) : shown.delete(run.name); redraw(); });
  const bar = element("progress", {max: run.epochs || 1, value: run.epoch, "aria-label": `epochs of ${run.name}`});
  const cells = {
    state: [element("span", {class: `state ${run.state}`}, `${MARKS[run.state]} ${run.state}`)],
    epochs: [bar, ` ${short(run.epoch)} of ${run.epochs}`], left: [duration(run.left)],
    "images/s": [run.speed ? short(run.speed) : "–"], loss: [run.loss === null || run.loss === undefined ? "–" : short(run.loss)],
    "R²": [percent(run.r2)], "k-NN": [percent(run.knn)], linear: [percent(run.linear)],
  };
  const made = Object.entries(cells).map(([name, parts]) => element("td", {"data-name": name}, ...parts));
  return element("tr", {}, element("th", {scope: "row"}, element("label", {}, box, swatch(look), run.name)), ...made);
}

function pictures(runs) {
  const made = runs.filter(run => shown.has(run.name) && run.pictures).map(run => {
    const source = `/picture.png?run=${encodeURIComponent(run.name)}&at=${run.pictures[0]}`;
    const image = element("img", {src: source, alt: `sample images of ${run.name}: image, visible, hidden, predicted, restored`});
    return element("figure", {}, element("h3", {}, run.name), image, element("figcaption", {}, "image, visible, hidden, predicted, restored"));
  });
  document.getElementById("pictures").replaceChildren(...made);
}

function draw(state) {
  // Of many runs those that train are ticked, and some others.
  for (const run of state.runs.filter(run => !known.has(run.name)).sort((a, b) => (b.state === "training") - (a.state === "training"))) {
    known.add(run.name);
    if (run.state === "training" || shown.size < MOST) shown.add(run.name);
  }
  const redraw = () => draw(state), at = document.activeElement?.getAttribute("aria-label");
  document.getElementById("runs").tBodies[0].replaceChildren(...state.runs.map((run, i) => row(run, state.curves.runs[i], redraw)));
  if (at) [...document.querySelectorAll("input")].find(box => box.getAttribute("aria-label") === at)?.focus();
  document.getElementById("all").onclick = () => {
    const every = state.runs.every(run => shown.has(run.name));
    for (const run of state.runs) every ? shown.delete(run.name) : shown.add(run.name);
    redraw();
  };
  document.getElementById("folder").textContent = state.folder;
  const counts = Object.keys(MARKS).map(kind => [state.runs.filter(run => run.state === kind).length, kind]).filter(([count]) => count);
  document.getElementById("said").textContent = state.runs.length ? counts.map(([count, kind]) => `${count} ${kind}`).join(", ") : "no runs here yet";
  curves(document.getElementById("curves"), state.curves, shown);
  document.querySelector("#curves .toggles")?.remove();
  pictures(state.runs);
}

async function look() {
  const lost = document.getElementById("lost");
  try {
    if (document.visibilityState === "visible") {
      const text = await (await fetch("/runs.json")).text();
      if (text !== before) { draw(JSON.parse(text)); before = text; }
      lost.hidden = true;
    }
  } catch { lost.hidden = false; }
  setTimeout(look, EVERY);
}
look();
