/* The report's viewer: lists with filters; runs, mined pairs and RL groups to look at.

Everything that is shown is in the address (#run=folder/id&step=3&with=folder/id), so the back button, links
and reloads work, and `route` draws what the address says. Data files are scripts that call `loaded`, because
a page of file:// may not fetch. Texts come from pages and models: they are set as text, never as markup.
*/
"use strict";

const PAGE_ROWS = 200;
const KEPT_FILES = 12;
const KINDS = { run: "runs", pair: "pairs", group: "groups" }; // what a page address may open, and its list
const KEYS = { j: "step+1", ArrowRight: "step+1", k: "step-1", ArrowLeft: "step-1", n: "run+1", p: "run-1" };
const BOXES = ["all", "named", "none"];
const waiting = new Map();
const files = new Map();
const filters = {}; // list -> address with the filters that were last set
const shown = { boxes: "all", prompt: false, rows: PAGE_ROWS, sides: [] };
let lists = {};

const find = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const blank = (value) => value === undefined || value === null || value === "";

/* ------------------------------------------------------------------------------------ files and addresses */

function loaded(name, data) {
  waiting.get(name)?.(data);
}

/** Return the data of a file, loaded once; the last few are kept. */
function load(name) {
  if (!files.has(name)) {
    files.set(name, new Promise((resolve, reject) => {
      const script = document.createElement("script");
      waiting.set(name, resolve);
      script.onload = () => script.remove();
      script.onerror = () => reject(new Error(`report_files/${name}.js is missing`));
      script.src = `report_files/${name}.js`;
      document.head.append(script);
    }));
    for (const old of [...files.keys()].slice(0, -KEPT_FILES)) files.delete(old);
  }
  return files.get(name);
}

/** Return the parameters of the address; a part without = is a parameter without a value. */
function address(from = location.hash) {
  const plain = (text) => {
    try { return decodeURIComponent(text); } catch { return text; }
  };
  return new Map(from.slice(1).split("&").map((part) => {
    const at = part.indexOf("=");
    return at < 0 ? [plain(part), ""] : [plain(part.slice(0, at)), plain(part.slice(at + 1))];
  }));
}

function hash(values) {
  const quoted = (text) => encodeURIComponent(text).replaceAll("%2F", "/");
  return `#${[...values].map((pair) => pair.filter((text) => text !== "").map(quoted).join("=")).join("&")}`;
}

/** Go to an address in place of the current one, with changed parameters; an empty one is taken out. */
function change(changes) {
  const values = address();
  for (const [name, value] of Object.entries(changes)) {
    if (blank(value)) values.delete(name);
    else values.set(name, String(value));
  }
  location.replace(hash(values));
}

/* ---------------------------------------------------------------------------------------------- templates */

/** Return a copy of a template with data in it: data-text, data-each, data-link, data-picture; see the templates. */
function fill(name, data) {
  const copy = find(`#t-${name}`).content.cloneNode(true);
  const drop = (place) => (place.closest("[data-if]") ?? place).remove();
  for (const place of all("[data-text]", copy)) {
    const value = data[place.dataset.text];
    if (blank(value)) drop(place);
    else place.textContent = value;
  }
  for (const place of all("[data-each]", copy)) {
    const items = data[place.dataset.each] ?? [];
    if (items.length) place.append(...items.map((item) => fill(place.dataset.template, item)));
    else place.closest("[data-if]")?.remove();
  }
  for (const place of all("[data-picture]", copy)) {
    if (data.picture) {
      place.onerror = () => place.replaceWith("the picture is missing");
      place.src = data.picture;
    } else drop(place);
  }
  for (const place of all("[data-link]", copy)) if (data.link) place.href = data.link;
  for (const mark of all(".mark, .outcome", copy)) mark.classList.add(data.outcome);
  return copy;
}

/* -------------------------------------------------------------------------------------------------- lists */

/** Return the rows of a list that the filters of an address leave. */
function chosen(name, values) {
  const words = (values.get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = all(`#${name} select`).map((select) => select.name).filter((field) => values.get(field));
  return (lists[name] ?? []).filter((row) =>
    wanted.every((field) => String(row[field]) === values.get(field)) && words.every((word) => row.text.includes(word)));
}

function drawList(name, values) {
  const section = find(`#${name}`);
  const rows = chosen(name, values);
  const kind = Object.keys(KINDS).find((key) => KINDS[key] === name);
  for (const input of all("[name]", section)) {
    if (input !== document.activeElement || input.tagName === "SELECT") input.value = values.get(input.name) ?? "";
  }
  find("output", section).textContent = `${rows.length} of ${lists[name].length}`;
  find("tbody", section).replaceChildren(...rows.slice(0, shown.rows).map((row) =>
    fill(name, { ...row, link: hash([[kind, row.key]]) })));
  find(".more", section).hidden = rows.length <= shown.rows;
}

function startList(name) {
  const section = find(`#${name}`);
  const form = find("form", section);
  for (const row of lists[name]) {
    row.text = Object.values(row).filter((value) => ["string", "number"].includes(typeof value)).join(" ").toLowerCase();
  }
  for (const select of all("select", form)) {
    const counts = new Map();
    for (const row of lists[name]) counts.set(row[select.name], (counts.get(row[select.name]) ?? 0) + 1);
    const order = new Intl.Collator(undefined, { numeric: true }).compare;
    for (const [value, count] of [...counts].sort(([a], [b]) => order(a, b))) {
      if (!blank(value)) select.append(new Option(`${value} (${count})`, value));
    }
  }
  form.oninput = () => {
    shown.rows = PAGE_ROWS;
    change(Object.fromEntries(new FormData(form)));
  };
  form.onsubmit = (event) => event.preventDefault();
  form.onreset = () => location.replace(`#${name}`);
  find(".more", section).onclick = () => {
    shown.rows += PAGE_ROWS;
    drawList(name, address());
  };
}

/* ------------------------------------------------------------------------------------------------- boxes */

/** Return whether two rectangles [x, y, width, height] overlap. */
function overlap(a, b) {
  return a[0] < b[0] + b[2] && b[0] < a[0] + a[2] && a[1] < b[1] + b[3] && b[1] < a[1] + a[3];
}

/** Put each label beside its box, where it covers neither a box nor a label; else beside its own box. */
function placeLabels(layer) {
  const frame = [0, 0, layer.clientWidth, layer.clientHeight];
  const marks = all("i", layer).map((mark) => ({
    mark, label: find("b", mark), box: [mark.offsetLeft, mark.offsetTop, mark.offsetWidth, mark.offsetHeight],
  }));
  const taken = marks.map(({ box }) => box);
  for (const { label, box } of marks) {
    const [x, y, width, height] = box;
    const size = [label.offsetWidth, label.offsetHeight];
    const beside = [
      [x, y - size[1]], [x - size[0], y], [x + width, y], [x + width - size[0], y - size[1]], [x, y + height],
      [x + width, y + height - size[1]], [x - size[0], y + height - size[1]],
    ].map((corner) => [...corner, ...size]).filter(([left, top]) =>
      left >= 0 && top >= 0 && left + size[0] <= frame[2] && top + size[1] <= frame[3]);
    const spot = beside.find((place) => !taken.some((other) => overlap(place, other))) ?? beside[0] ?? [x, y, ...size];
    label.style.left = `${spot[0] - x}px`;
    label.style.top = `${spot[1] - y}px`;
    taken.push(spot);
  }
}

function drawBoxes(layer, boxes) {
  layer.append(...boxes.map(({ index, name, used, box }) => {
    const mark = document.createElement("i");
    const label = document.createElement("b");
    ["left", "top", "width", "height"].forEach((side, at) => { mark.style[side] = `${100 * box[at]}%`; });
    mark.title = `[${index}] ${name}`;
    mark.classList.toggle("used", used);
    label.textContent = index;
    mark.append(label);
    return mark;
  }));
  new ResizeObserver(() => placeLabels(layer)).observe(layer);
}

/* ------------------------------------------------------------------------------------------------- viewer */

const rowOf = (name, key) => (lists[name] ?? []).find((row) => row.key === key);

/** Return the sides that an address shows: where each run lies, at which step it starts, the name of its parameter. */
function sidesOf(kind, row, values) {
  if (kind !== "run") return row.sides.map((side, at) => ({ ...side, at: at ? "withstep" : "step" }));
  const other = rowOf("runs", values.get("with"));
  const named = (run, at) => ({ run: run.key, file: run.file, step: 1, at, name: other && `${run.policy}, ${run.run}: ${run.outcome}` });
  return [named(row, "step"), ...(other ? [named(other, "withstep")] : [])];
}

async function drawSide(side, row, values) {
  const run = side.file ? await load(side.file) : { steps: [] };
  const extra = row.state_file ? await load(row.state_file) : {};
  const numbers = run.steps.map((step) => step.number);
  const last = Math.max(...numbers, 1);
  const number = Math.min(Math.max(1, Number(values.get(side.at)) || side.step), numbers.length ? last : side.step);
  const step = run.steps.find((item) => item.number === number) ?? { ...side, number: side.step };
  const own = side.step === number ? extra : {};
  const view = fill("side", { ...run, name: side.name, link: side.run && hash([["run", side.run], ["step", side.step]]) });
  const strip = find(".strip", view);
  for (const item of run.steps) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = item.number;
    button.title = item.goal || item.actions.map((action) => action.text).join(" ") || item.unusable;
    button.classList.toggle("current", item.number === number);
    button.classList.toggle("bad", Boolean(item.unusable) || item.results.some((result) => result.error));
    button.onclick = () => change({ [side.at]: item.number });
    strip.append(button);
  }
  const drawn = fill("step", { ...step, ...own, no_picture: step.picture ? "" : "no picture" });
  for (const layer of all(".boxes", drawn)) drawBoxes(layer, step.boxes ?? []);
  for (const place of all(".prompt", drawn)) {
    place.open = shown.prompt;
    place.ontoggle = () => { shown.prompt = place.open; };
  }
  find(".place", view).append(drawn);
  return { view, at: side.at, number, last };
}

async function drawView(kind, values) {
  const name = KINDS[kind];
  const row = rowOf(name, values.get(kind));
  const view = find("#view");
  if (!row) {
    view.replaceChildren(`This report has no ${kind} ${values.get(kind)}.`);
    return;
  }
  const answers = kind === "group" ? await load(row.file) : {};
  const nowhere = row.sides?.length === 0 ? "The state's picture and prompt are shown if its mined folder is among the folders of the report." : "";
  const head = fill(kind, { ...row, nowhere });
  const drawn = await Promise.all(sidesOf(kind, row, values).map((side) => drawSide(side, row, values)));
  if (location.hash !== shown.hash) return; // meanwhile another address was opened
  const sides = document.createElement("div");
  sides.className = "sides";
  sides.dataset.boxes = shown.boxes;
  sides.append(...drawn.map((side) => side.view));
  if (kind === "group") sides.append(fill("answers", { ...row, ...answers }));
  for (const back of all(".back", head)) back.href = filters[name] ?? `#${name}`;
  for (const select of all("[name=with]", head)) {
    for (const other of lists.runs) {
      if (other !== row && other.task_id === row.task_id && other.task === row.task) {
        select.append(new Option(`${other.policy}, ${other.run}: ${other.outcome}, ${other.steps} steps`, other.key));
      }
    }
    select.value = values.get("with") ?? "";
    select.onchange = () => change({ with: select.value, withstep: "" });
    if (select.options.length === 1) select.closest(".compare").remove();
  }
  for (const button of all("[data-key]", head)) button.onclick = () => press(button.dataset.key);
  view.replaceChildren(head, sides);
  shown.sides = drawn;
}

/* --------------------------------------------------------------------------------------- routes and keys */

/** Draw what the address says. */
async function route() {
  shown.hash = location.hash;
  const values = address();
  const kind = Object.keys(KINDS).find((name) => values.has(name));
  const list = Object.values(KINDS).find((name) => values.has(name) && find(`#${name}`));
  const section = kind ? "view" : list ?? "overview";
  const opened = kind ? `${kind}=${values.get(kind)}` : section;
  if (kind) {
    try {
      await drawView(kind, values);
    } catch (error) {
      find("#view").replaceChildren(error.message);
    }
  } else if (list) {
    filters[list] = location.hash;
    drawList(list, values);
  }
  for (const part of all("main > section")) part.hidden = part.id !== section;
  for (const link of all("header nav a")) {
    link.classList.toggle("current", link.hash === `#${kind ? KINDS[kind] : section}`);
  }
  if (opened !== shown.opened) {
    shown.scroll = { ...shown.scroll, [shown.opened]: scrollY };
    scrollTo(0, kind ? 0 : shown.scroll[opened] ?? 0);
  }
  shown.opened = opened;
}

/** Do what a key says; return whether it says anything here. */
function press(key) {
  const values = address();
  const kind = Object.keys(KINDS).find((name) => values.has(name));
  const [what, by] = (KEYS[key] ?? "").split(/(?=[+-])/);
  if (key === "?") find("#keys").showModal();
  else if (key === "/") {
    const list = kind ? KINDS[kind] : Object.values(KINDS).find((name) => values.has(name)) ?? "runs";
    if (kind || !values.has(list)) location.hash = filters[list] ?? `#${list}`;
    setTimeout(() => find(`#${list} [name=q]`)?.focus(), 50);
  } else if (!kind) return false;
  else if (key === "Escape") location.hash = filters[KINDS[kind]] ?? `#${KINDS[kind]}`;
  else if (key === "b") {
    shown.boxes = BOXES[(BOXES.indexOf(shown.boxes) + 1) % BOXES.length];
    find(".sides").dataset.boxes = shown.boxes;
  } else if (key === "t") {
    shown.prompt = !shown.prompt;
    for (const place of all("#view .prompt")) place.open = shown.prompt;
  } else if (key === "c") find("#view [name=with]")?.focus();
  else if (what === "step") {
    change(Object.fromEntries(shown.sides.map(({ at, number, last }) =>
      [at, Math.min(Math.max(1, number + Number(by)), last)])));
  } else if (what === "run") {
    const rows = chosen(KINDS[kind], address(filters[KINDS[kind]] ?? ""));
    const at = rows.findIndex((row) => row.key === values.get(kind));
    const next = rows[at < 0 ? 0 : at + Number(by)];
    if (next) location.hash = hash([[kind, next.key]]);
  } else return false;
  return true;
}

addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, dialog[open]");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing) {
    if (event.key === "Escape") typing.blur();
  } else if (press(event.key)) event.preventDefault();
});
addEventListener("hashchange", route);
find("#help").onclick = () => find("#keys").showModal();
load("lists").then((data) => {
  lists = data;
  Object.keys(lists).filter((name) => find(`#${name}`)).forEach(startList);
  return route();
}, (error) => find("#overview").prepend(error.message));
