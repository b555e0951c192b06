// What actions need of the page: a node's click point, its value, its options, scrolling, finding a text, the
// page as plain HTML.
//
// A function takes the number of a node (see `idOf`) and answers with plain data; {error} says in words why
// it cannot be done.

const words = (text) => { const s = squeeze(text); return s.length > 60 ? s.slice(0, 60) + "..." : s; };
const describe = (el) => {
  if (!el) return "nothing";
  if (hides(el)) return "<form>";
  const name = words(nameOf(el)), id = el.getAttribute("id");
  return `<${el.localName}${id ? ` id=${words(id)}` : ""}>` + (name ? ` "${name}"` : "");
};
const find = (id) => {
  const node = nodeOf(id);
  return node && node.isConnected && node.ownerDocument === document ? node : null;
};
const GONE = { error: "is no longer on the page" };
// A function of a number -> the same function of the node.
const onNode = (use) => (id, ...rest) => { const el = find(id); return el ? use(el, ...rest) : GONE; };
const typable = (el) => is(el, "input, textarea");
const still = matchMedia("(scripting: none)").matches; // a sandboxed frame: no timer or listener runs in it
const frames = (n) => new Promise((resolve) => {
  const step = () => (n-- > 0 && !still ? requestAnimationFrame(step) : resolve());
  step();
  later(resolve, 300);
});
const same = (a, b) => a.every((value, i) => Math.abs(value - b[i]) < 1);
const overflow = (el) => getComputedStyle(el).overflowY;
const rolls = (el) => isElement(el) && /auto|scroll|overlay/.test(overflow(el)) && el.scrollHeight > el.clientHeight + 1;
const bringIntoView = (el, block) => el.scrollIntoView({ block, inline: "nearest", behavior: "instant" });

// -------------------------------------------------------------------------------------------------- clicking
const visible = (el) => { // the part of the window in which the element's scroll containers show it
  let clip = view();
  for (let n = parentOf(el); n && n !== document.body; n = parentOf(n)) {
    const clips = isElement(n) && n !== document.documentElement && getComputedStyle(n).overflowX !== "visible";
    if (clips) clip = meet(clip, boxOf(n));
  }
  return clip;
};
const suggests = (el) => el.getAttribute("role") === "combobox" || el.hasAttribute("aria-autocomplete");
// The next press is meant for one node. If it would reach another, because the page moved at the last moment,
// the page does not get it. If the page moves between press and release, the browser gives the click to what
// holds both nodes, which nobody aimed at: the page does not get that click either. A click that goes to such
// a node while the element still lies under the pointer is the page's own doing: it captured the pointer.
const AIM_MS = 5000;
let aim = null; // stays null where no listener runs
const aimAt = (el) => { aim = still ? null : { el, until: now() + AIM_MS }; };
const around = (hit, el) => { // what holds the pressed node and is not the element
  const found = new Set();
  for (let n = hit; n; n = parentOf(n)) if (n instanceof Element && !leadsTo(n, el)) found.add(n);
  return found;
};
const lies = (el, x, y) => { const hit = hitAt(x, y); return !!hit && el.isConnected && leadsTo(hit, el); };
const judge = (event) => {
  if (aim && now() > aim.until) aim = null;
  if (!aim || !event.isTrusted) return;
  const { type, clientX, clientY } = event;
  if (type === "pointerdown") {
    aim.hit = hitAt(clientX, clientY) || document.documentElement;
    aim.missed = !aim.el || !leadsTo(aim.hit, aim.el);
    aim.around = aim.missed ? null : around(aim.hit, aim.el);
  }
  const stray = type === "click" && aim.around?.has(event.composedPath()[0]) && !lies(aim.el, clientX, clientY);
  if (type === "click" && !stray) aim.clicked = true;
  if (aim.missed || stray) { event.preventDefault(); event.stopImmediatePropagation(); }
};
for (const type of wordsIn("pointerdown mousedown pointerup mouseup click auxclick dblclick contextmenu")) {
  window.addEventListener(type, judge, true);
}
const pressed = () => { // what became of the press
  const { missed, hit, clicked } = aim || { missed: false, clicked: true };
  aim = null;
  if (missed) return { clicked: !!clicked, missed: `moved at the last moment: ${describe(hit)} is in its place` };
  return { clicked: !!clicked, missed: missed === undefined ? "was covered at the last moment" : "" };
};
// Scrolls the element into view if it is not there, waits until it has come to rest, and gives the point to
// click: {x, y, what, tag, type, ...}.
const OTHER_WINDOW = "a[target]:not([target=_self]):not([target=_top]):not([target=_parent])";
const prepare = async (id) => {
  const el = find(id);
  if (!el) return GONE;
  state.invalid = [];
  const facts = { tag: el.localName, type: el.type || "", role: el.getAttribute("role") || "", what: describe(el),
    disabled: disabled(el), readonly: !!el.readOnly, editable: el.isContentEditable,
    combobox: suggests(el) || el.hasAttribute("list"), suggests: suggests(el), opened: state.opened,
    blank: el.closest?.(OTHER_WINDOW)?.target || "" };
  if (!el.checkVisibility({ visibilityProperty: true })) return { ...facts, error: "is not visible any more" };
  if (!reachable(el, visible(el))) bringIntoView(el, "center");
  for (let tries = 0; tries < 10; tries++) { // moving things are waited for
    const before = boxOf(el);
    await frames(1);
    if (!find(id)) return GONE;
    if (same(before, boxOf(el))) break;
  }
  const point = pointOf(el, visible(el));
  aimAt(el);
  if ("x" in point) return { ...facts, ...point };
  const { blocker } = point;
  return { ...facts, error: blocker ? `is covered by ${describe(blocker)}` : "cannot be scrolled into view" };
};
// Where (x, y) of a frame's content is in this document; an error if a click there would not reach the frame.
const frameAt = onNode((el, x, y) => {
  const start = contentOf(el), at = { x: x * start.zoom + start.x, y: y * start.zoom + start.y };
  const hit = hitAt(at.x, at.y);
  aimAt(null); // a press on the frame's content is none in this document
  return hit === el ? at : { error: `is covered by ${describe(hit)}` };
});
const reveal = onNode((el) => { bringIntoView(el, "nearest"); return {}; });
const check = onNode(() => ({}));
// Whether a click at a point would reach the element now.
const reaches = onNode((el, x, y) => (lies(el, x, y) ? { yes: true } : { yes: false, hit: describe(hitAt(x, y)) }));

// What the browser said against sending a form since the last `prepare`, in a bubble that is not part of the
// page.
const refused = () => {
  const refusing = state.invalid.splice(0).slice(0, 5);
  return { words: refusing.map((el) => `${describe(el)}: ${el.validationMessage}`) };
};

// -------------------------------------------------------------------------------------------- typing, values
const textOf = (el) => {
  if (typable(el)) return el.value;
  return el.isContentEditable ? el.innerText.replace(/\n$/, "") : null;
};
const read = onNode((el) => ({ value: textOf(el) }));
const active = () => {
  let el = document.activeElement;
  while (el && shadow(el)?.activeElement) el = shadow(el).activeElement;
  return el;
};
const takesText = (el) => el && (typable(el) || el.isContentEditable);
// Whether the element is part of an editor that has the focus.
const inEditor = (el) => el.isContentEditable && within(active(), el);
// Gives the element the focus and, with `clear`, selects all it holds; else puts the caret to its end.
const focus = (id, clear) => {
  let el = find(id);
  if (!el) return GONE;
  // The click gave the focus to the field that belongs to the element, perhaps to one that only now appeared
  // over it.
  if (!takesText(el) || (takesText(active()) && !reachable(el, visible(el)))) el = active();
  if (!takesText(el)) return { error: "takes no text; if it listens to keys, click it and use send_keys" };
  if (active() !== el && !inEditor(el)) el.focus({ preventScroll: true });
  const focused = active();
  if (focused !== el && !(focused?.isContentEditable && inEditor(el))) {
    return { error: "does not take the focus, so it cannot be typed into" };
  }
  if (!typable(el)) {
    const range = document.createRange(), selection = getSelection();
    range.selectNodeContents(el);
    if (!clear) range.collapse(false);
    selection.removeAllRanges();
    selection.addRange(range);
  } else if (clear) {
    el.select();
  } else {
    const { length } = el.value;
    try { el.setSelectionRange(length, length); } catch { /* number, email and others have no caret to set */ }
  }
  return { id: idOf(focused), what: describe(el), value: textOf(el) ?? textOf(focused) };
};
const changed = (el) => {
  for (const type of ["input", "change"]) el.dispatchEvent(new Event(type, { bubbles: true, composed: true }));
};
const OWNERS = { INPUT: HTMLInputElement, SELECT: HTMLSelectElement, OPTION: HTMLOptionElement };
// Sets a property with the native setter: frameworks put their own on the element.
const assign = (el, name, value) =>
  Object.getOwnPropertyDescriptor(OWNERS[el.tagName].prototype, name).set.call(el, value);
// Sets a field that has no text to type (date, time, colour, range) and says what it holds afterwards.
const set = onNode(async (el, value) => {
  el.focus({ preventScroll: true });
  assign(el, "value", value);
  changed(el);
  await frames(1);
  return { value: el.value };
});

const fileField = (id) => { // the file input that an element is, holds, labels or is beside
  const el = find(id), fits = (node) => node && is(node, "input[type=file]");
  if (!el) return null;
  const label = el.closest("label") || el.querySelector("label");
  const own = [el, el.control, el.querySelector("input[type=file]"), label?.control].find(fits);
  if (own) return own;
  for (let n = el.parentElement, i = 0; n && i < 3; n = n.parentElement, i++) {
    const near = n.querySelectorAll("input[type=file]");
    if (near.length) return near.length === 1 ? near[0] : null;
  }
  return null;
};

// ------------------------------------------------------------------------------------------------- dropdowns
const OPTION = "[role=option], [role=menuitem], [role=menuitemradio], [role=menuitemcheckbox], [role=treeitem]";
const LISTS = "[role=listbox], [role=menu]";
const displayed = (el) => el.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && has(boxOf(el));
const displayedOptions = (place) => { // through slots and shadow roots
  const found = [];
  const walk = (node) => {
    if (isElement(node) && is(node, OPTION) && displayed(node)) found.push(node);
    childrenOf(node).forEach(walk);
  };
  childrenOf(place).forEach(walk);
  return found;
};
const optionsOf = (el) => { // of a dropdown of the page's own making, wherever its list is
  const root = el.getRootNode(), linked = el.getAttribute("aria-controls") || el.getAttribute("aria-owns") || "";
  const places = linked.split(/\s+/).map((id) => id && (root.getElementById?.(id) || document.getElementById(id)));
  places.push(el, el.closest(LISTS), ...root.querySelectorAll?.(LISTS) ?? [], ...document.querySelectorAll(LISTS));
  for (const place of places) {
    const found = place ? displayedOptions(place) : [];
    if (found.length) return found;
  }
  return [];
};
// Resolves when a field's list of suggestions is shown, or after `ms`.
const suggestions = async (id, ms) => {
  const end = now() + ms, el = find(id);
  while (el && !still && !optionsOf(el).length && now() < end) await new Promise((resolve) => later(resolve, 20));
  return {};
};
const nativeOption = (option, i) => ({ id: i, text: optionText(option), value: option.value, chosen: option.selected,
  off: option.disabled || !!option.closest("optgroup")?.disabled });
const madeOption = (el) => {
  const on = (name) => el.getAttribute(name) === "true";
  return { id: idOf(el), text: squeeze(el.textContent), value: el.getAttribute("data-value") || "",
    chosen: on("aria-selected") || on("aria-checked"), off: on("aria-disabled") };
};
const options = onNode((el) => {
  const native = el.localName === "select";
  return { native, disabled: disabled(el),
    options: native ? list(el.options, nativeOption) : optionsOf(el).map(madeOption) };
});
const choose = onNode(async (el, number) => {
  const option = el.options?.[number];
  if (!option) return GONE;
  el.focus({ preventScroll: true });
  if (el.multiple) assign(option, "selected", true);
  else assign(el, "selectedIndex", number);
  changed(el);
  await frames(2);
  return {};
});

// ------------------------------------------------------------------------------------------------- scrolling
const shownArea = (el) => { const r = meet(boxOf(el), view()); return has(r) ? areaOf(r) : 0; };
const largest = (root) => {
  const panes = list(root.querySelectorAll("*")).filter((el) => rolls(el) && displayed(el));
  return panes.sort((a, b) => shownArea(b) - shownArea(a))[0];
};
// What scrolls when no element is named: a dialog in the middle of the window, the page, or the largest pane
// of a page that does not scroll itself.
const mainScroller = () => {
  let pane = null;
  for (let n = hitAt(window.innerWidth / 2, window.innerHeight / 2); n; n = parentOf(n)) {
    if (rolls(n)) pane ??= n;
    const dialog = isElement(n) && is(n, "dialog, [role=dialog], [role=alertdialog]");
    if (dialog && (pane ??= largest(n))) return pane;
  }
  const page = pageScroller();
  const locked = [document.documentElement, document.body].some((el) => el && /hidden|clip/.test(overflow(el)));
  if (!locked && page.scrollHeight > window.innerHeight + 1) return page;
  return largest(document) || page;
};
// Scrolls the page (id null) or the nearest scroll container of a node by a share of its height; `moved` in
// px.
const scroll = async (id, pages) => {
  let box = id === null ? null : find(id);
  if (!box && id !== null) return GONE;
  while (box && (!rolls(box) || box === document.body)) box = parentOf(box);
  box ??= mainScroller();
  const height = box === document.scrollingElement ? window.innerHeight : box.clientHeight, before = box.scrollTop;
  box.scrollBy({ top: pages * height, behavior: "instant" });
  await frames(2);
  const rest = box.scrollHeight - box.clientHeight - box.scrollTop;
  return { moved: box.scrollTop - before, height, below: Math.max(0, rest) / height };
};
const UNREAD = setOf("script style noscript template option title");
const scrollToText = async (wanted) => {
  const needle = squeeze(wanted).toLowerCase(), places = [];
  let all = "";
  const space = () => { if (!all.endsWith(" ")) all += " "; };
  const walk = (node) => {
    if (node.nodeType === 3) {
      const part = node.data.replace(/\s+/g, " ").toLowerCase();
      places.push([all.length, node]);
      all += all.endsWith(" ") ? part.replace(/^ /, "") : part;
      return;
    }
    const display = isElement(node) ? getComputedStyle(node).display : "inline";
    if (display === "none" || UNREAD.has(node.localName)) return;
    const block = !/inline|contents/.test(display);
    if (block) space();
    childrenOf(node).forEach(walk);
    if (block) space();
  };
  if (!needle || !document.body) return { found: false };
  walk(document.body);
  for (let at = all.indexOf(needle); at >= 0; at = all.indexOf(needle, at + 1)) {
    const node = places.filter(([start]) => start <= at).pop()[1], el = holderOf(node), range = document.createRange();
    if (!displayed(el)) continue;
    range.selectNodeContents(node);
    const inside = () => overlap(boxOf(range), visible(el));
    if (!inside()) bringIntoView(el, "center");
    await frames(1);
    if (inside()) return { found: true };
  }
  return { found: false };
};

// ------------------------------------------------------------------------------------------ the page as HTML
// What is displayed, shadow roots in place; <rms-frame id=..> takes the place of a frame's own document.
const VOID = setOf("br hr img input wbr");
const OMITTED = setOf("script style noscript template head svg datalist");
const escape = (s) => s.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");
const fieldText = (el) => {
  if (["password", "hidden", "file"].includes(el.type)) return "";
  return toggles(el) ? (el.checked ? "[x] " : "[ ] ") : el.value + " ";
};
const openingTag = (el, name) => {
  const kept = ["colspan", "rowspan", "start"].filter((a) => el.hasAttribute(a)).map((a) => [a, el.getAttribute(a)]);
  if (el.localName === "a" && el.href) kept.push(["href", String(el.href)]);
  if (el.localName === "img") kept.push(["alt", el.alt]);
  return `<${name}${kept.map(([a, value]) => ` ${a}="${escape(value)}"`).join("")}>`;
};
const html = () => {
  const parts = [];
  const walk = (node) => {
    if (node.nodeType === 3) { parts.push(escape(node.data)); return; }
    const tag = node.localName;
    if (!isElement(node) || OMITTED.has(tag) || getComputedStyle(node).display === "none") return;
    if (isFrame(node)) parts.push(`<rms-frame id="${idOf(node)}"></rms-frame>`);
    else if (tag === "select") parts.push(escape(chosenTexts(node.selectedOptions)) + " ");
    else if (typable(node)) parts.push(escape(fieldText(node)));
    else {
      const name = tag.includes("-") ? "div" : tag;
      parts.push(openingTag(node, name));
      if (VOID.has(tag)) return;
      childrenOf(node).forEach(walk);
      parts.push(`</${name}>`);
    }
  };
  if (document.body) walk(document.body);
  return parts.join("");
};

const api = { token, idOf, nodeOf, adopt, report, quiet, check, refused, reaches, prepare, pressed, frameAt, reveal, read,
  focus, set, fileField, options, suggestions, choose, scroll, scrollToText, html };
Object.defineProperty(window, "__rms", { value: api, enumerable: false });
