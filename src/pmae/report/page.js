// What a report can do beyond being read: copy commands, sort tables, show curves, walk the map, open the mistakes of a cell.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);

for (const box of document.querySelectorAll(".command")) {
  const text = box.firstChild, button = element("button", {type: "button"}, "copy");
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(text);
    // A browser that keeps the clipboard from files still has the text selected.
    try { await navigator.clipboard.writeText(text.textContent); button.textContent = "copied"; } catch { button.textContent = "selected"; }
  });
  box.append(button);
}

for (const table of document.querySelectorAll("table.sortable")) {
  if (table.tBodies[0].rows.length < 2) continue;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    if (!head.textContent) return;
    const button = element("button", {type: "button"}, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down < 0 ? "descending" : "ascending");
      const key = row => { const text = row.cells[column].textContent.replaceAll(",", "").replaceAll("−", "-"); const n = parseFloat(text); return isNaN(n) ? text : n; };
      const rows = [...table.tBodies[0].rows].map(row => [key(row), row]);
      rows.sort(([a], [b]) => typeof a !== typeof b ? (typeof a === "number" ? -1 : 1) : down * (a > b ? 1 : a < b ? -1 : 0));
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}

const place = document.getElementById("curves");
if (place && DATA.curves.panels.length) curves(place, DATA.curves, new Set(DATA.curves.runs.map(run => run.name)));

function thumbnail(map, i, size) {
  const sprite = DATA.sprites[map.sprite], made = element("span", {class: "thumb", role: "img", "aria-label": `image ${map.places[i]}`});
  const scale = size / sprite.side;
  made.style.cssText = `width:${sprite.width * scale}px;height:${sprite.height * scale}px;background-image:url(${sprite.url});` +
    `background-size:${sprite.columns * sprite.width * scale}px auto;` +
    `background-position:-${(i % sprite.columns) * sprite.width * scale}px -${Math.floor(i / sprite.columns) * sprite.height * scale}px`;
  return made;
}

function named(map, i) { return map.classes[map.labels[i]] ?? String(map.labels[i]); }

function neighbours(map, i, found, title) {
  const same = found.filter(j => map.labels[j] === map.labels[i]).length;
  const list = found.map(j => {
    const other = map.labels[j] !== map.labels[i];
    return element("figure", {class: other ? "other" : "same"}, thumbnail(map, j, 56),
      element("figcaption", {}, `${other ? "✗" : "✓"} ${named(map, j)}`));
  });
  return element("div", {}, element("h4", {}, `${title}: ${same} of ${found.length} of the same class`), element("div", {class: "row"}, ...list));
}

for (const [id, map] of Object.entries(DATA.maps)) {
  const box = document.getElementById(id), svg = box.querySelector("svg"), panel = box.querySelector(".detail");
  const tip = element("div", {class: "tip"});
  tip.hidden = true;
  svg.parentNode.append(tip);
  let chosen = null;
  const choose = i => {
    chosen?.classList.remove("chosen");
    chosen = svg.querySelector(`[data-i="${i}"]`);
    chosen?.classList.add("chosen");
    const said = map.predicted ? `, taken for ${map.classes[map.predicted[i]] ?? map.predicted[i]}` : "";
    panel.replaceChildren(element("div", {class: "row"}, thumbnail(map, i, 96), element("p", {}, `image ${map.places[i]}: ${named(map, i)}${said}`)),
      neighbours(map, i, map.neighbours[i], "Nearest after pretraining"), neighbours(map, i, map.random[i], "Nearest with random weights"));
  };
  const points = [...svg.querySelectorAll("[data-i]")].map(one => [one, ...one.getAttribute("d").match(/^M(-?\d+) (-?\d+)/).slice(1).map(Number)]);
  // The nearest point of a class that is shown, within what a finger covers.
  const nearest = event => {
    const frame = svg.getBoundingClientRect(), scale = 560 / frame.width;
    const x = (event.clientX - frame.left) * scale, y = (event.clientY - frame.top) * scale;
    let best = null, least = 16 * Math.max(scale, 1);
    for (const [one, px, py] of points) {
      const away = Math.hypot(px - x, py - y);
      if (away < least && !one.parentNode.classList.contains("dim")) { best = +one.dataset.i; least = away; }
    }
    return best;
  };
  svg.addEventListener("pointermove", event => {
    const i = nearest(event);
    tip.hidden = i === null;
    if (tip.hidden) return;
    tip.replaceChildren(thumbnail(map, i, 72), element("div", {}, named(map, i)));
    const frame = svg.parentNode.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX - frame.left + 12, frame.width - 110)}px`;
    tip.style.top = `${event.clientY - frame.top + 12}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  svg.addEventListener("click", event => { const i = nearest(event); if (i !== null) choose(i); });
  for (const button of box.querySelectorAll("button[data-class]")) {
    button.disabled = false;
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      for (const other of box.querySelectorAll("button[data-class]")) other.setAttribute("aria-pressed", String(on && other === button));
      for (const group of svg.querySelectorAll("g[data-class]")) group.classList.toggle("dim", on && group.dataset.class !== button.dataset.class);
    });
  }
  const mistakes = document.getElementById(`${id}-mistakes`);
  for (const button of document.querySelectorAll(`button[data-map="${id}"]`)) {
    button.disabled = false;
    button.addEventListener("click", () => {
      const [truth, answer] = button.dataset.cell.split(",").map(Number);
      const found = map.labels.map((label, i) => i).filter(i => map.labels[i] === truth && map.predicted && map.predicted[i] === answer);
      const title = truth === answer ? `${map.classes[truth]}, and taken for it` : `${map.classes[truth]}, but taken for ${map.classes[answer]}`;
      const shown = found.slice(0, 24).map(i => element("figure", {}, thumbnail(map, i, 56), element("figcaption", {}, `image ${map.places[i]}`)));
      mistakes.replaceChildren(element("h4", {}, `${title}: ${found.length} of the ${map.labels.length} images on the map`), element("div", {class: "row"}, ...shown));
    });
  }
}
document.documentElement.classList.add("scripted");
