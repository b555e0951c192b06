// The page's side of the browser layer, run in every document before its own scripts.
//
// It remembers what the page alone cannot tell afterwards (listeners, closed shadow roots, mutations, window.open), gives every node it
// reports a number that stays with that node, and turns the document into the list of lines of the state in one pass: `observe`.
// The helpers that actions need are in act.js. Both talk through one hidden property of the window.
(() => {
  if (window.__rms) return;
  const MARGIN = 1000; // CSS px around the viewport in which elements still get an index
  // Names as they are before the page's scripts, some of which give them other meanings.
  const { Map, Set, WeakMap, WeakRef, Promise, getComputedStyle } = window, list = Array.from.bind(Array), { stringify } = JSON;
  const now = performance.now.bind(performance), later = window.setTimeout.bind(window);
  const getter = (owner, name) => { const { get } = Object.getOwnPropertyDescriptor(owner.prototype, name); return (node) => get.call(node); };
  const parentNode = getter(Node, "parentNode"), childNodes = getter(Node, "childNodes"), fields = getter(HTMLFormElement, "elements");

  // ------------------------------------------------------------------------------------------------ hooks
  const CLICK_EVENTS = new Set(["click", "mousedown", "mouseup", "pointerdown", "pointerup", "touchstart", "touchend", "dblclick"]);
  const listeners = new WeakMap(); // node -> Map(type -> Set of callbacks)
  const roots = new WeakMap(); // host -> closed shadow root
  const state = { mutated: now(), opened: 0, invalid: [] }; // invalid: fields for which the browser itself refused to send a form
  const observer = new MutationObserver(() => { state.mutated = now(); });
  const WATCHED = { childList: true, characterData: true, subtree: true, attributes: true,
    attributeFilter: ["class", "hidden", "disabled", "open", "inert", "aria-expanded", "aria-hidden", "src"] };
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
  addEventListener.call(document, "invalid", (event) => { if (state.invalid.length < 20) state.invalid.push(event.composedPath()[0]); }, true);
  const { attachShadow, closest } = Element.prototype;
  Element.prototype.attachShadow = function (options) {
    const root = attachShadow.call(this, options);
    if (options.mode === "closed") adopt(this, root);
    else observer.observe(root, WATCHED);
    return root;
  };
  const open = window.open;
  window.open = function (...args) { state.opened += 1; return open.apply(window, args); };

  const adopt = (host, root) => { roots.set(host, root); observer.observe(root, WATCHED); };
  const shadow = (el) => el.shadowRoot || roots.get(el) || null;
  const listens = (el) => { for (const set of listeners.get(el)?.values() ?? []) if (set.size) return true; return false; };

  // ------------------------------------------------------------------------------------------ node identity
  const token = list(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("");
  const ids = new WeakMap(), nodes = new Map();
  let count = 0, previous = null;
  const idOf = (node) => {
    if (!ids.has(node)) { ids.set(node, ++count); nodes.set(count, new WeakRef(node)); }
    return ids.get(node);
  };
  // A list that keeps few rows and fills them anew while it scrolls puts another thing into the same node. What an indexed node stood for is
  // remembered; one that stands for something else after its list was scrolled is another node: it loses its number.
  const shownAs = new Map(); // number -> [meaning, how far all around it was scrolled]
  const scrolled = (node) => { let sum = 0; for (let n = node; n; n = parentOf(n)) sum += n.scrollTop || 0; return sum; };
  const MEANT = ["href", "data-index", "data-id", "aria-posinset", "aria-rowindex"];
  const meaning = (el, name = nameOf(el)) => [editable(el) ? "" : name, ...MEANT.map((attribute) => el.getAttribute(attribute))].join("|");
  const recycled = (id, el) => {
    const then = shownAs.get(id);
    return then !== undefined && then[1] !== scrolled(el) && then[0] !== meaning(el);
  };

  // ---------------------------------------------------------------------------------------------- geometry
  // Rectangles are [left, top, right, bottom] in CSS px of this frame's viewport.
  const boxOf = (r) => [r.left, r.top, r.right, r.bottom];
  const meet = (a, b) => [Math.max(a[0], b[0]), Math.max(a[1], b[1]), Math.min(a[2], b[2]), Math.min(a[3], b[3])];
  const has = (r) => r[2] - r[0] > 1 && r[3] - r[1] > 1;
  const view = () => [0, 0, window.innerWidth, window.innerHeight];
  const contentOf = (frame) => { // where a frame's document starts, and by how much it is drawn larger or smaller than it is
    const box = frame.getBoundingClientRect(), style = getComputedStyle(frame), zoom = box.width / frame.offsetWidth || 1;
    const start = (edge, border, padding) => edge + (border + parseFloat(padding)) * zoom;
    return { x: start(box.left, frame.clientLeft, style.paddingLeft), y: start(box.top, frame.clientTop, style.paddingTop), zoom };
  };
  // Where a node stands in the flat tree. A form's own fields do not hide its parent and children.
  const parentOf = (node) => (node instanceof HTMLFormElement ? parentNode(node) : node.assignedSlot || node.parentNode || node.host || null);
  const childrenOf = (el) => shadow(el)?.childNodes ?? (el.localName === "slot" && el.assignedNodes().length ? el.assignedNodes() : childNodes(el));
  const within = (outer, node) => { for (let n = node; n; n = parentOf(n)) if (n === outer) return true; return false; };
  const hitAt = (x, y) => {
    let hit = document.elementFromPoint(x, y);
    for (let root = hit && shadow(hit); root; root = hit && shadow(hit)) {
      const inner = root.elementFromPoint(x, y);
      if (!inner || inner === hit || !within(root, inner)) break;
      hit = inner;
    }
    return hit;
  };
  const control = (el) => (el.localName === "label" ? el.control : null);
  const leadsTo = (hit, el) => within(el, hit) || closest.call(hit, "label")?.control === el || control(el) === hit; // a click on a label is one on its control
  const POINTS = [[0.5, 0.5], [0.25, 0.25], [0.75, 0.75], [0.25, 0.75], [0.75, 0.25], [0.5, 0.1], [0.1, 0.5], [0.9, 0.5], [0.5, 0.9]];
  // The first of some points of the element where a click would reach it: {x, y}, or {blocker}, or {} where nothing of it is in `clip`.
  const pointOf = (el, clip, points = POINTS) => {
    let rects = list(el.getClientRects(), boxOf);
    if (!rects.some(has)) rects = list(el.children, (child) => boxOf(child.getBoundingClientRect()));
    rects = rects.map((r) => meet(r, clip)).filter(has).sort((a, b) => (b[2] - b[0]) * (b[3] - b[1]) - (a[2] - a[0]) * (a[3] - a[1])).slice(0, 3);
    let blocker = null;
    for (const r of rects) for (const [fx, fy] of points) {
      const x = r[0] + fx * (r[2] - r[0]), y = r[1] + fy * (r[3] - r[1]), hit = hitAt(x, y);
      if (hit && leadsTo(hit, el)) return { x, y };
      blocker ??= hit;
    }
    return { blocker };
  };

  // ------------------------------------------------------------------------------------- what an element is
  const SKIP = new Set(["script", "style", "noscript", "template", "head", "meta", "link", "title", "desc", "datalist", "option", "optgroup",
    "source", "track", "param"]);
  const CONTROLS = new Set(["button", "input", "select", "textarea"]);
  const ROLES = new Set(["button", "link", "menuitem", "menuitemradio", "menuitemcheckbox", "option", "radio", "checkbox", "switch", "tab", "textbox",
    "combobox", "slider", "spinbutton", "searchbox", "treeitem"]);
  const WHOLE = new Set(["a", "button", "summary"]); // what stands inside belongs to them
  const STATIC_ROLES = new Set(["region", "dialog", "alertdialog", "main", "group", "tabpanel", "presentation", "document", "article",
    "list", "table", "grid"]);
  const NAMES = ["title", "type", "id", "name", "role", "placeholder", "data-date-format", "alt", "aria-label", "aria-expanded", "data-state", "aria-checked",
    "aria-selected", "aria-pressed", "aria-valuemin", "aria-valuemax", "aria-valuenow", "aria-valuetext", "aria-placeholder", "aria-haspopup", "aria-invalid",
    "aria-autocomplete", "aria-disabled", "pattern", "min", "max", "minlength", "maxlength", "step", "accept", "autocomplete", "inputmode", "contenteditable"];
  const squeeze = (text) => (text || "").replace(/\s+/g, " ").trim();
  const editable = (el) => el.isContentEditable && !(el.parentElement && el.parentElement.isContentEditable);
  // Whether a form's fields have names that hide properties of its own which are used here: form.parentNode is then a field.
  const USED = new Set(["localName", "getAttribute", "hasAttribute", "getBoundingClientRect", "getClientRects", "checkVisibility", "matches", "closest",
    "inert", "childNodes", "firstElementChild", "parentElement", "parentNode", "nodeType", "tabIndex", "textContent", "onclick",
    "isContentEditable", "scrollTop"]);
  const hides = (el) => el instanceof HTMLFormElement && list(fields(el)).some((field) => USED.has(field.name) || USED.has(field.getAttribute("id")));
  const disabled = (el) => el.matches(":disabled");
  const toggles = (el) => el.localName === "input" && (el.type === "checkbox" || el.type === "radio");
  const unseen = (el) => { // also where it is only clipped away, as libraries do to what they draw themselves
    const r = el.getBoundingClientRect(), { clip, clipPath, pointerEvents } = getComputedStyle(el);
    return r.width <= 1 || r.height <= 1 || clip.startsWith("rect(0px, 0px") || /^inset\((50|100)%/.test(clipPath) || pointerEvents === "none"
      || !el.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  };
  // The index rule. An element gets an index when all of this holds (where: `element` below):
  //  1. It is displayed and visible, not all but transparent, larger than 1 px, and its box meets the viewport or the 1,000 px above and below
  //     it, in every box around it that clips (`shown`).
  //  2. A click on it means something (`nature`), or it is a frame of at least 100 x 100 px.
  //  3. It is usable: not a disabled control, not inert or aria-hidden, not outside an open modal dialog (`idle`).
  //  4. Inside the viewport a click at one of nine points reaches it, something in it, or its label (`pointOf`). Outside that is tested when it is used.
  // Then, once what it holds is known (`settle`): a mere handler around two or more indexed elements, or around one that is all it shows, loses its
  // index (the latter holds for a shadow host too), and a scroll container without an indexed element gets one, so that it can be scrolled.
  //
  // Why a click on the element means something: "own" (by its nature), "listener" (only a handler, or only focusable), or "".
  const nature = (el, style, ctx) => {
    const tag = el.localName, role = el.getAttribute("role");
    if (tag === "html" || tag === "body") return editable(el) ? "own" : "";
    if (tag === "input") return el.type === "hidden" || (el.labels?.length && unseen(el)) ? "" : "own"; // its label stands for it
    if (CONTROLS.has(tag) || tag === "summary" || tag === "canvas" || editable(el) || ROLES.has(role)) return "own";
    if (tag === "a" && el.hasAttribute("href")) return "own";
    if ((tag === "audio" || tag === "video") && el.controls) return "own";
    if (tag === "label") return el.control && unseen(el.control) && !disabled(el.control) ? "own" : "";
    if (el.onclick || el.onmousedown || el.onmouseup || el.onpointerdown || el.onpointerup) return "own";
    if (style.cursor === "pointer" && !ctx.pointer && !ctx.whole) return "own";
    if (listens(el)) return "listener";
    if (el.hasAttribute("tabindex") && el.tabIndex >= 0 && !STATIC_ROLES.has(role) && !ctx.whole) return "listener";
    return "";
  };
  const wordsOf = (el) => { // with what slots in it show
    const slots = el.getRootNode().host ? list(el.querySelectorAll("slot")) : [];
    return squeeze([el, ...slots.flatMap((slot) => slot.assignedNodes({ flatten: true }))].map((node) => node.textContent.slice(0, 2000)).join(" "));
  };
  const pictured = (el) => { // what a picture in an element without words is called
    const inner = el.querySelector("[aria-label], img[alt], svg title, [title]");
    const name = inner && ["aria-label", "alt", "title"].map((attribute) => inner.getAttribute(attribute)).find(Boolean);
    return inner ? squeeze(name || inner.textContent).slice(0, 200) : "";
  };
  const nameOf = (el) => {
    const by = (el.getAttribute("aria-labelledby") || "").split(/\s+/).map((id) => id && el.getRootNode().getElementById?.(id)?.textContent).filter(Boolean);
    const own = CONTROLS.has(el.localName) && el.localName !== "button";
    const text = el.getAttribute("aria-label") || by.join(" ") || (own ? list(el.labels || [], (l) => l.textContent).join(" ") : wordsOf(el))
      || el.getAttribute("alt") || pictured(el) || el.getAttribute("title") || el.getAttribute("placeholder") || "";
    return squeeze(text.slice(0, 1000)).slice(0, 200);
  };
  const attributesOf = (el) => {
    const found = {}, box = toggles(el) ? el : toggles(control(el) || el) ? control(el) : null;
    for (const name of NAMES) { const value = el.getAttribute(name); if (value) found[name] = value.slice(0, 300); }
    if (box && box !== el) found.type = box.type;
    if (box) found.checked = String(box.checked);
    if (found["aria-disabled"] === "false") delete found["aria-disabled"];
    if (el.required) found.required = "true";
    if (el.multiple) found.multiple = "true";
    if (el.readOnly) found.readonly = "true";
    if (!found["aria-label"] && !found.title && !found.alt && !wordsOf(el) && pictured(el)) found.alt = pictured(el);
    if (CONTROLS.has(el.localName) && disabled(el)) found.disabled = "true";
    return found;
  };
  const valueOf = (el) => {
    if (el.localName === "textarea") return el.value;
    if (el.localName === "select") return list(el.selectedOptions).filter((o) => o.value !== "").map((o) => squeeze(o.text)).join(", ");
    if (el.localName !== "input" || el.type === "password" || el.type === "image") return null;
    if (el.type === "file") return list(el.files, (file) => file.name).join(", ");
    return toggles(el) ? (el.getAttribute("value") || null) : el.value;
  };
  const clear = (color) => { const m = /rgba\(.*?([\d.]+)\)$/.exec(color); return color === "transparent" || (m !== null && parseFloat(m[1]) < 0.8); };
  // Whether `hit` paints over what lies below: it or an ancestor that does not hold `el` has an opaque background.
  const opaque = (hit, el) => {
    for (let n = hit; n && n.nodeType === 1 && !within(n, el); n = parentOf(n)) {
      const style = getComputedStyle(n);
      if (parseFloat(style.opacity) < 0.8) return false;
      if (!clear(style.backgroundColor) || style.backgroundImage !== "none" || ["img", "video", "canvas", "iframe"].includes(n.localName)) return true;
    }
    return false;
  };

  // ------------------------------------------------------------------------------------------- the one pass
  // options: {x, y, scale: of this frame in the top viewport, clip: visible part of this frame or null, covered: nothing of it can be clicked}
  const observe = (options = {}) => {
    const lines = [], seen = new Set(), range = document.createRange(), frame = view();
    const [dx, dy, scale] = [options.x || 0, options.y || 0, options.scale || 1], clip = options.clip ? meet(options.clip, frame) : frame;
    const reach = [frame[0], frame[1] - MARGIN, frame[2], frame[3] + MARGIN];
    let sealed = false; // whether an element shows something that is not in the tree: a closed root that came with the HTML
    const stats = { links: 0, interactive: 0, iframes: 0, scrolls: 0, open: 0, closed: 0, images: 0, total: 0 };
    const modal = list(document.querySelectorAll("dialog:modal")).pop() || null;
    const round = (r) => [r[0] * scale + dx, r[1] * scale + dy, (r[2] - r[0]) * scale, (r[3] - r[1]) * scale].map((n) => Math.round(n * 10) / 10);
    const showsIn = (node) => (node.nodeType === 1 ? node.checkVisibility() : node.nodeType === 3 && squeeze(node.data) !== "");
    const put = (node, line) => {
      if (recycled(ids.get(node), node)) { nodes.delete(ids.get(node)); ids.delete(node); }
      const id = idOf(node);
      if (line.i && line.t !== "iframe") shownAs.set(id, [meaning(node, line.x), scrolled(node)]);
      seen.add(id);
      lines.push({ k: id, n: false, i: false, ...line });
      return lines[lines.length - 1];
    };

    const text = (node, ctx) => {
      const words = squeeze(node.data);
      if (!words || (words.length < 2 && !/[\p{L}\p{N}]/u.test(words)) || ctx.hidden) return;
      range.selectNodeContents(node);
      const box = boxOf(range.getBoundingClientRect());
      if (!has(meet(box, ctx.reach))) return;
      const shown = meet(box, ctx.clip), inside = has(shown), el = node.parentElement || node.getRootNode().host;
      if (inside && el) {
        const hit = hitAt((shown[0] + shown[2]) / 2, (shown[1] + shown[3]) / 2);
        if (hit && !within(el, hit) && !within(hit, el) && opaque(hit, el)) return;
      }
      lines.push({ k: idOf(node), t: "#text", x: words, b: round(box), p: inside, d: ctx.depth, n: false, i: false });
      seen.add(idOf(node));
    };

    const children = (el, ctx) => {
      for (const child of childrenOf(el)) {
        if (child.nodeType === 1) element(child, ctx);
        else if (child.nodeType === 3) text(child, ctx);
      }
    };

    // Scroll container -> [pages above, pages below]; null where there is nothing to scroll.
    const scroller = (el, style) => {
      if (["html", "body", "textarea", "select", "input"].includes(el.localName) || !/auto|scroll/.test(style.overflowY)) return null;
      const height = el.clientHeight, more = el.scrollHeight - height;
      return height > 20 && more > 4 ? [el.scrollTop / height, Math.max(0, more - el.scrollTop) / height].map((n) => Math.round(n * 100) / 100) : null;
    };

    // What the children of an element inherit: clipping, containing block, opacity, and what they stand in.
    const inherit = (el, style, ctx, box, opacity) => {
      const next = { ...ctx, opacity, hidden: style.visibility !== "visible", pointer: style.cursor === "pointer",
        inert: ctx.inert || el.inert || el.getAttribute("aria-hidden") === "true" || (modal !== null && !within(el, modal) && !within(modal, el)) };
      if (style.overflowX !== "visible" && el.localName !== "html" && el.localName !== "body" && style.display !== "inline" && style.display !== "contents") {
        const rolls = (value) => (value === "auto" || value === "scroll" ? MARGIN : 0), [rx, ry] = [rolls(style.overflowX), rolls(style.overflowY)];
        next.clip = meet(next.clip, box);
        next.reach = meet(next.reach, [box[0] - rx, box[1] - ry, box[2] + rx, box[3] + ry]);
      }
      if (style.position !== "static" || style.transform !== "none") next.block = { clip: next.clip, reach: next.reach };
      return next;
    };

    const element = (el, outer) => {
      if (hides(el)) { // what it holds stands for it
        for (const child of childNodes(el)) if (child.nodeType === 1) element(child, outer);
        return;
      }
      const tag = el.localName;
      if (SKIP.has(tag)) return;
      const style = getComputedStyle(el);
      if (style.display === "none" || (style.display !== "contents" && !el.checkVisibility())) return;
      const opacity = outer.opacity * parseFloat(style.opacity);
      stats.total += 1;
      if (opacity < 0.02) return;
      let ctx = outer;
      if (style.position === "fixed") ctx = { ...outer, clip, reach: frame };
      else if (style.position === "absolute") ctx = { ...outer, ...outer.block };
      let box = boxOf(el.getBoundingClientRect());
      if (!has(box) && (tag === "a" || tag === "label") && el.firstElementChild) box = boxOf(el.firstElementChild.getBoundingClientRect());
      const shown = style.visibility === "visible" && has(meet(box, ctx.reach)), inside = shown && has(meet(box, ctx.clip));
      const next = inherit(el, style, ctx, box, opacity);
      if (tag === "img" && shown) stats.images += 1;
      if (tag.includes("-") && shown && !shadow(el) && !list(el.childNodes).some(showsIn)) sealed = true;

      const why = nature(el, style, ctx), root = shadow(el), pages = shown ? scroller(el, style) : null, isFrame = tag === "iframe" || tag === "frame";
      const idle = next.inert || options.covered || (CONTROLS.has(tag) && disabled(el));
      const frameBig = isFrame && box[2] - box[0] >= 100 && box[3] - box[1] >= 100;
      const wanted = shown && !idle && (frameBig || why !== "");
      const can = wanted && (isFrame || !inside || "x" in pointOf(el, ctx.clip));
      const greyed = shown && CONTROLS.has(tag) && disabled(el) && why !== "";
      let line = null;
      if (can || greyed || pages || (isFrame && shown) || root) {
        const marker = isFrame ? "iframe" : root ? (el.shadowRoot ? "shadow-open" : "shadow-closed") : pages ? "scroll" : null;
        line = put(el, { t: tag, i: can, r: el.getAttribute("role"), a: attributesOf(el), x: why !== "" ? nameOf(el) : "", v: valueOf(el), m: marker, s: pages,
          b: round(box), p: inside, d: outer.depth });
        if (tag === "select") line.o = list(el.options, (option) => squeeze(option.text));
        if (isFrame) { // `f`: what the frame's own pass needs to know
          const { x, y, zoom } = contentOf(el), part = meet(box, ctx.clip);
          line.f = { x: x * scale + dx, y: y * scale + dy, scale: zoom * scale,
            clip: [part[0] - x, part[1] - y, part[2] - x, part[3] - y].map((n) => n / zoom),
            covered: idle || (inside && !("x" in pointOf(el, ctx.clip))) };
          line.i = can && !line.f.covered;
        }
        next.depth = outer.depth + 1;
      }
      if (can && (WHOLE.has(tag) || ROLES.has(el.getAttribute("role")))) next.whole = true;
      if (pages) stats.scrolls += 1;
      if (isFrame) stats.iframes += 1;
      if (root) stats[el.shadowRoot ? "open" : "closed"] += 1;
      if (isFrame || tag === "select" || tag === "textarea" || tag === "input" || tag === "canvas" || tag === "audio" || tag === "video") return;

      const at = lines.length;
      children(el, next);
      if (line) settle(line, at, why === "listener" ? "all" : root ? "one" : "", pages && !next.inert);
    };

    // After the children: a handler that only serves the controls inside is no target, nor is it or a shadow host where one control is all it shows; a
    // scroller without one needs an index; what shows no words of its own says what it is called.
    const settle = (line, at, serves, scrolls) => {
      const below = lines.slice(at), [only, ...more] = below.filter((other) => other.i), reads = (other) => other.t === "#text", area = ({ b }) => b[2] * b[3];
      const bare = only && !more.length && (area(only) > 0.8 * area(line) || !below.some((other) => reads(other) && other.d <= only.d));
      if (line.i && ((serves === "all" && more.length) || (serves && bare))) line.i = false;
      const wordless = !below.some(reads) && !["aria-label", "title", "alt"].some((name) => line.a[name]);
      if (line.i && line.x && wordless) line.a["aria-label"] = line.x;
      if (!line.i && scrolls && !only && !options.covered) line.i = true;
      const empty = line.m === null || (line.m.startsWith("shadow") && lines.length === at);
      if (!line.i && !line.a.disabled && empty) {
        for (let i = at; i < lines.length; i++) lines[i].d -= 1;
        lines.splice(at - 1, 1);
      }
    };

    const start = { depth: 0, clip, reach, block: { clip, reach }, opacity: 1, hidden: false, pointer: false, inert: false, whole: false };
    if (document.documentElement) element(document.documentElement, start);
    const indexed = lines.filter((line) => line.i);
    for (const line of indexed) line.n = previous !== null && !previous.has(line.k);
    previous = new Set(indexed.map((line) => line.k));
    stats.interactive = indexed.length;
    stats.links = indexed.filter((line) => line.t === "a").length;
    for (const id of shownAs.keys()) if (!seen.has(id)) shownAs.delete(id);
    const page = document.scrollingElement || document.documentElement;
    return { token, lines, stats, sealed, title: document.title, url: location.href,
      scroll: window.scrollY, height: window.innerHeight, width: window.innerWidth, full: page ? page.scrollHeight : 0,
      pdf: document.contentType === "application/pdf" || !!document.querySelector("embed[type='application/pdf']") };
  };

  // Whether something is on its way to its place: a transition or animation that ends within a second and changes more than colours.
  const moving = () => document.getAnimations().some((animation) => {
    const rest = (animation.effect?.getComputedTiming().endTime ?? 0) - (animation.currentTime ?? 0);
    return animation.playState === "running" && rest > 0 && rest < 1000 && !/color|shadow|outline|filter|fill|stroke/.test(animation.transitionProperty || "");
  });
  // Resolves when the document is parsed, nothing moves and nothing was added, removed or reworded for `ms` since `ago` ms before the call, or after `max`.
  const quiet = (ms, max, ago) => new Promise((resolve) => {
    const start = now();
    const look = () => {
      const time = now(), rest = ms - (time - Math.max(state.mutated, start - ago));
      if (time - start >= max || (document.readyState !== "loading" && rest <= 0 && !moving())) resolve(state.opened);
      else later(look, Math.min(Math.max(rest, 5), max - (time - start)));
    };
    look();
  });

  // The report as JSON text; what a page has taught arrays, objects and plain values about JSON does not count.
  const report = (options) => {
    const own = [Object, Array, String, Number, Boolean].map(({ prototype }) => [prototype, Object.getOwnPropertyDescriptor(prototype, "toJSON")]);
    for (const [prototype, found] of own) if (found) delete prototype.toJSON;
    try { return stringify(observe(options)); } finally { for (const [prototype, found] of own) if (found) Object.defineProperty(prototype, "toJSON", found); }
  };
  const nodeOf = (id) => {
    const node = nodes.get(id)?.deref();
    return node && !recycled(id, node) ? node : null;
  };
  const api = { adopt, contentOf, list, now, later, childrenOf, report, quiet, token, state, idOf, nodeOf, pointOf, boxOf, meet, has, view, within, shadow,
    hitAt, leadsTo, hides, squeeze, nameOf, disabled, toggles, parentOf };
  Object.defineProperty(window, "__rms", { value: api, enumerable: false });
})();
