// The page's side of the browser layer, run in every document before its own scripts: what others build on.
//
// page.py joins dom.js, observe.js and act.js into one function that runs once in a document. This file
// remembers what the page alone cannot tell afterwards (listeners, closed shadow roots, mutations,
// window.open), gives every node that is reported a number that stays with that node, and holds the geometry.

const MARGIN = 1000; // CSS px around the viewport in which elements still get an index
// Names as they are before the page's scripts, some of which give them other meanings.
const { Map, Set, WeakMap, WeakRef, Promise, getComputedStyle } = window;
const { stringify } = JSON, list = Array.from.bind(Array);
const now = performance.now.bind(performance), later = window.setTimeout.bind(window);
const wordsIn = (text) => text.trim().split(/\s+/);
const setOf = (text) => new Set(wordsIn(text));
const getter = (owner, name) => {
  const { get } = Object.getOwnPropertyDescriptor(owner.prototype, name);
  return (node) => get.call(node);
};
const parentNode = getter(Node, "parentNode"), childNodes = getter(Node, "childNodes");
const fields = getter(HTMLFormElement, "elements");

// ----------------------------------------------------------------------------------------------------- hooks
const CLICK_EVENTS = setOf("click mousedown mouseup pointerdown pointerup touchstart touchend dblclick");
const listeners = new WeakMap(); // node -> Map(type -> Set of callbacks)
const roots = new WeakMap(); // host -> closed shadow root
// `invalid`: fields for which the browser itself refused to send a form.
const state = { mutated: now(), opened: 0, invalid: [] };
const observer = new MutationObserver(() => { state.mutated = now(); });
const WATCHED = { childList: true, characterData: true, subtree: true, attributes: true,
  attributeFilter: wordsIn("class hidden disabled open inert aria-expanded aria-hidden src") };
observer.observe(document, WATCHED);

const { addEventListener, removeEventListener } = EventTarget.prototype;
EventTarget.prototype.addEventListener = function (type, callback, ...rest) {
  if (callback && CLICK_EVENTS.has(type) && this instanceof Element) {
    if (!listeners.has(this)) listeners.set(this, new Map());
    const types = listeners.get(this);
    if (!types.has(type)) types.set(type, new Set());
    types.get(type).add(callback);
  }
  return addEventListener.call(this ?? window, type, callback, ...rest);
};
EventTarget.prototype.removeEventListener = function (type, callback, ...rest) {
  listeners.get(this)?.get(type)?.delete(callback);
  return removeEventListener.call(this ?? window, type, callback, ...rest);
};
const noteInvalid = (event) => { if (state.invalid.length < 20) state.invalid.push(event.composedPath()[0]); };
addEventListener.call(document, "invalid", noteInvalid, true);
const { attachShadow, closest, matches } = Element.prototype;
Element.prototype.attachShadow = function (options) {
  const root = attachShadow.call(this, options);
  if (options.mode === "closed") adopt(this, root);
  else observer.observe(root, WATCHED);
  return root;
};
const openWindow = window.open;
window.open = function (...args) { state.opened += 1; return openWindow.apply(window, args); };

const adopt = (host, root) => { roots.set(host, root); observer.observe(root, WATCHED); };
const shadow = (el) => el.shadowRoot || roots.get(el) || null;
const listens = (el) => listeners.has(el) && list(listeners.get(el).values()).some((callbacks) => callbacks.size);

// --------------------------------------------------------------------------------------------- node identity
const token = list(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("");
const ids = new WeakMap(), nodes = new Map();
let count = 0;
const idOf = (node) => {
  if (!ids.has(node)) { ids.set(node, ++count); nodes.set(count, new WeakRef(node)); }
  return ids.get(node);
};
const nodeOf = (id) => {
  const node = nodes.get(id)?.deref();
  return node && !recycled(id, node) ? node : null;
};
// A list that keeps few rows and fills them anew while it scrolls puts another thing into the same node. What
// an indexed node stood for is remembered; one that stands for something else after its list was scrolled is
// another node: it loses its number.
const shownAs = new Map(); // number -> [meaning, how far all around it was scrolled]
const scrolled = (node) => {
  let sum = 0;
  for (let n = node; n; n = parentOf(n)) sum += n.scrollTop || 0;
  return sum;
};
const MEANT = wordsIn("href data-index data-id aria-posinset aria-rowindex");
const meaning = (el, name = nameOf(el)) =>
  [editable(el) ? "" : name, ...MEANT.map((attribute) => el.getAttribute(attribute))].join("|");
const recycled = (id, el) => {
  const then = shownAs.get(id);
  return then !== undefined && then[1] !== scrolled(el) && then[0] !== meaning(el);
};

// -------------------------------------------------------------------------------------------------- the tree
// A form's fields may have names that hide properties of the form which are used here: form.parentNode is
// then a field.
const USED = setOf(`
  localName getAttribute hasAttribute getBoundingClientRect getClientRects checkVisibility matches closest
  inert childNodes firstElementChild parentElement parentNode nodeType tabIndex textContent onclick
  isContentEditable scrollTop`);
const hides = (el) => el instanceof HTMLFormElement
  && list(fields(el)).some((field) => USED.has(field.name) || USED.has(field.getAttribute("id")));
const is = (el, selector) => matches.call(el, selector);
const isElement = (node) => node.nodeType === 1;
const isFrame = (el) => is(el, "iframe, frame");
// Parent and children in the flat tree. A form's own fields do not hide them.
const parentOf = (node) =>
  (node instanceof HTMLFormElement ? parentNode(node) : node.assignedSlot || node.parentNode || node.host || null);
const childrenOf = (el) => {
  const slotted = el.localName === "slot" ? el.assignedNodes() : [];
  return shadow(el)?.childNodes ?? (slotted.length ? slotted : childNodes(el));
};
const holderOf = (node) => node.parentElement || node.getRootNode().host; // the element that a text is in
const within = (outer, node) => {
  for (let n = node; n; n = parentOf(n)) if (n === outer) return true;
  return false;
};
const editable = (el) => el.isContentEditable && !el.parentElement?.isContentEditable;
const disabled = (el) => is(el, ":disabled");
const off = (el) => is(el, ":is(button, input, select, textarea):disabled");
const toggles = (el) => is(el, "input[type=checkbox], input[type=radio]");
const control = (el) => (el.localName === "label" ? el.control : null);

// -------------------------------------------------------------------------------------------------- geometry
// Rectangles are [left, top, right, bottom] in CSS px of this frame's viewport.
const edges = (r) => [r.left, r.top, r.right, r.bottom];
const boxOf = (place) => edges(place.getBoundingClientRect());
const meet = (a, b) => [Math.max(a[0], b[0]), Math.max(a[1], b[1]), Math.min(a[2], b[2]), Math.min(a[3], b[3])];
const sizeOf = (r) => [r[2] - r[0], r[3] - r[1]];
const has = (r) => r[2] - r[0] > 1 && r[3] - r[1] > 1;
const overlap = (a, b) => has(meet(a, b));
const areaOf = (r) => { const [width, height] = sizeOf(r); return width * height; };
const view = () => [0, 0, window.innerWidth, window.innerHeight];
const pageScroller = () => document.scrollingElement || document.documentElement;
// Where a frame's document starts, and by how much it is drawn larger or smaller than it is.
const contentOf = (frame) => {
  const box = frame.getBoundingClientRect(), style = getComputedStyle(frame), zoom = box.width / frame.offsetWidth || 1;
  const start = (edge, border, padding) => edge + (border + parseFloat(padding)) * zoom;
  return { x: start(box.left, frame.clientLeft, style.paddingLeft), y: start(box.top, frame.clientTop, style.paddingTop),
    zoom };
};
const hitAt = (x, y) => {
  let hit = document.elementFromPoint(x, y);
  for (let root = hit && shadow(hit); root; root = hit && shadow(hit)) {
    const inner = root.elementFromPoint(x, y);
    if (!inner || inner === hit || !within(root, inner)) break;
    hit = inner;
  }
  return hit;
};
// A click on a label is one on its control.
const leadsTo = (hit, el) => within(el, hit) || closest.call(hit, "label")?.control === el || control(el) === hit;
const POINTS = [[50, 50], [25, 25], [75, 75], [25, 75], [75, 25], [50, 10], [10, 50], [90, 50], [50, 90]]; // percent
// The first of nine points of the element at which a click would reach it: {x, y}, or {blocker: what covers
// it}, with null if nothing of it is in `clip`.
const pointOf = (el, clip) => {
  let rects = list(el.getClientRects(), edges);
  if (!rects.some(has)) rects = list(el.children, boxOf);
  rects = rects.map((r) => meet(r, clip)).filter(has).sort((a, b) => areaOf(b) - areaOf(a)).slice(0, 3);
  let blocker = null;
  for (const r of rects) {
    const [width, height] = sizeOf(r);
    for (const [right, down] of POINTS) {
      const x = r[0] + width * right / 100, y = r[1] + height * down / 100, hit = hitAt(x, y);
      if (hit && leadsTo(hit, el)) return { x, y };
      blocker ??= hit;
    }
  }
  return { blocker };
};
const reachable = (el, clip) => "x" in pointOf(el, clip);

// ------------------------------------------------------------------------------------- what a node is called
const squeeze = (text) => (text || "").replace(/\s+/g, " ").trim();
const wordsOf = (el) => { // with what its slots show
  const slots = el.getRootNode().host ? list(el.querySelectorAll("slot")) : [];
  const shown = [el, ...slots.flatMap((slot) => slot.assignedNodes({ flatten: true }))];
  return squeeze(shown.map((node) => node.textContent.slice(0, 2000)).join(" "));
};
const pictured = (el) => { // what a picture in an element without words is called
  const inner = el.querySelector("[aria-label], img[alt], svg title, [title]");
  const name = inner && ["aria-label", "alt", "title"].map((attribute) => inner.getAttribute(attribute)).find(Boolean);
  return inner ? squeeze(name || inner.textContent).slice(0, 200) : "";
};
const nameOf = (el) => {
  const get = (name) => el.getAttribute(name), by = (get("aria-labelledby") || "").split(/\s+/);
  const labelled = by.map((id) => id && el.getRootNode().getElementById?.(id)?.textContent).filter(Boolean).join(" ");
  const labels = () => list(el.labels || [], (label) => label.textContent).join(" ");
  const own = () => (is(el, "input, select, textarea") ? labels() : wordsOf(el));
  const text = get("aria-label") || labelled || own() || get("alt") || pictured(el) || get("title")
    || get("placeholder") || "";
  return squeeze(text.slice(0, 1000)).slice(0, 200);
};
