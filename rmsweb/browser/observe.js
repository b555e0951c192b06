// What a document shows: the index rule, the one pass that turns it into the lines of the state, and the wait
// until it is quiet.

const SKIP = setOf(`
  script style noscript template head meta link title desc datalist option optgroup source track param`);
const ROLES = setOf(`
  button link menuitem menuitemradio menuitemcheckbox option radio checkbox switch tab textbox combobox
  slider spinbutton searchbox treeitem`);
const WHOLE = setOf("a button summary"); // what is inside belongs to them
const STATIC_ROLES = setOf(`
  region dialog alertdialog main group tabpanel presentation document article list table grid`);
const NAMES = wordsIn(`
  title type id name role placeholder data-date-format alt aria-label aria-expanded data-state
  aria-checked aria-selected aria-pressed aria-valuemin aria-valuemax aria-valuenow aria-valuetext
  aria-placeholder aria-haspopup aria-invalid aria-autocomplete aria-disabled pattern min max minlength
  maxlength step accept autocomplete inputmode contenteditable`);
const CLICKABLE = "button, select, textarea, summary, canvas, a[href], audio[controls], video[controls]";
const CHILDLESS = setOf("iframe frame select textarea input canvas audio video");
const unseen = (el) => { // also if it is only clipped away, as libraries do to what they draw themselves
  const r = el.getBoundingClientRect(), { clip, clipPath, pointerEvents } = getComputedStyle(el);
  return r.width <= 1 || r.height <= 1 || clip.startsWith("rect(0px, 0px") || /^inset\((50|100)%/.test(clipPath)
    || pointerEvents === "none" || !el.checkVisibility({ opacityProperty: true, visibilityProperty: true });
};
// The index rule. An element gets an index if all of this holds (see `element` below):
//  1. It is displayed and visible, not all but transparent, larger than 1 px, and its box meets the viewport or
//     the 1,000 px above and below it, in every box around it that clips (`shown`).
//  2. A click on it means something (`nature`), or it is a frame of at least 100 x 100 px.
//  3. It is usable: no disabled control, not inert or aria-hidden, not outside an open modal dialog (`idle`).
//  4. Inside the viewport a click at one of nine points reaches it, something in it, or its label (`pointOf`).
//     Outside the viewport that is tested when it is used.
// Then, once its content is known (`settle`): a mere handler around two or more indexed elements, or around one
// that is all it shows, loses its index (the latter holds for a shadow host too), and a scroll container without
// an indexed element gets one, so that it can be scrolled.
//
// Why a click on the element means something: "own" (by its nature), "listener" (only a handler, or only
// focusable), or "".
const nature = (el, style, ctx) => {
  const tag = el.localName, role = el.getAttribute("role");
  if (is(el, "html, body")) return editable(el) ? "own" : "";
  if (tag === "input") return el.type === "hidden" || (el.labels?.length && unseen(el)) ? "" : "own"; // or its label
  if (is(el, CLICKABLE) || editable(el) || ROLES.has(role)) return "own";
  if (tag === "label") return el.control && unseen(el.control) && !disabled(el.control) ? "own" : "";
  if (el.onclick || el.onmousedown || el.onmouseup || el.onpointerdown || el.onpointerup) return "own";
  if (style.cursor === "pointer" && !ctx.pointer && !ctx.whole) return "own";
  if (listens(el)) return "listener";
  const focusable = el.hasAttribute("tabindex") && el.tabIndex >= 0;
  return focusable && !STATIC_ROLES.has(role) && !ctx.whole ? "listener" : "";
};
const attributesOf = (el) => {
  const found = {}, inner = toggles(el) ? el : control(el), box = inner && toggles(inner) ? inner : null;
  for (const name of NAMES) {
    const value = el.getAttribute(name);
    if (value) found[name] = value.slice(0, 300);
  }
  if (box && box !== el) found.type = box.type;
  if (box) found.checked = String(box.checked);
  if (found["aria-disabled"] === "false") delete found["aria-disabled"];
  for (const flag of ["required", "multiple", "readOnly"]) if (el[flag]) found[flag.toLowerCase()] = "true";
  if (!found["aria-label"] && !found.title && !found.alt && !wordsOf(el) && pictured(el)) found.alt = pictured(el);
  if (off(el)) found.disabled = "true";
  return found;
};
const shownValue = (el) => {
  if (el.localName === "textarea") return el.value;
  if (el.localName === "select") return chosenTexts(list(el.selectedOptions).filter((option) => option.value !== ""));
  if (el.localName !== "input" || el.type === "password" || el.type === "image") return null;
  if (el.type === "file") return list(el.files, (file) => file.name).join(", ");
  return toggles(el) ? (el.getAttribute("value") || null) : el.value;
};
const optionText = (option) => squeeze(option.text);
const chosenTexts = (options) => list(options, optionText).join(", ");
const clear = (color) => {
  const m = /rgba\(.*?([\d.]+)\)$/.exec(color);
  return color === "transparent" || (m !== null && parseFloat(m[1]) < 0.8);
};
// Whether `hit` paints over what lies below: it or an ancestor that does not hold `el` has an opaque
// background.
const opaque = (hit, el) => {
  for (let n = hit; n && isElement(n) && !within(n, el); n = parentOf(n)) {
    const style = getComputedStyle(n);
    if (parseFloat(style.opacity) < 0.8) return false;
    if (!clear(style.backgroundColor) || style.backgroundImage !== "none") return true;
    if (is(n, "img, video, canvas, iframe")) return true;
  }
  return false;
};

// ---------------------------------------------------------------------------------------------- the one pass
let previous = null; // numbers of what had an index in the pass before
// `place` of a frame: {x, y, scale} in the top viewport, `clip`: its visible part, `covered`: nothing of it
// can be clicked. The top document's is empty.
const observe = (place) => {
  const lines = [], seen = new Set(), range = document.createRange(), frame = view();
  const { x: dx = 0, y: dy = 0, scale = 1, clip: part = frame, covered = false } = place;
  const clip = meet(part, frame), reach = [frame[0], frame[1] - MARGIN, frame[2], frame[3] + MARGIN];
  let sealed = false; // an element shows something that is not in the tree: a closed root of the HTML itself
  const stats = { links: 0, interactive: 0, iframes: 0, scrolls: 0, open: 0, closed: 0, images: 0, total: 0 };
  const modal = list(document.querySelectorAll("dialog:modal")).pop() || null;
  const round = (n, digits) => Math.round(n * digits) / digits;
  const inTop = (r) => {
    const [width, height] = sizeOf(r);
    return [r[0] * scale + dx, r[1] * scale + dy, width * scale, height * scale].map((n) => round(n, 10));
  };
  const showsIn = (node) => (isElement(node) ? node.checkVisibility() : node.nodeType === 3 && squeeze(node.data) !== "");
  const put = (node, line) => {
    const id = idOf(node);
    seen.add(id);
    lines.push({ id, is_new: false, ...line });
    return lines[lines.length - 1];
  };

  const text = (node, ctx) => {
    const words = squeeze(node.data);
    if (!words || (words.length < 2 && !/[\p{L}\p{N}]/u.test(words)) || ctx.hidden) return;
    range.selectNodeContents(node);
    const box = boxOf(range);
    if (!overlap(box, ctx.reach)) return;
    const shown = meet(box, ctx.clip), inside = has(shown), el = holderOf(node);
    if (inside && el) {
      const hit = hitAt((shown[0] + shown[2]) / 2, (shown[1] + shown[3]) / 2);
      if (hit && !within(el, hit) && !within(hit, el) && opaque(hit, el)) return;
    }
    put(node, { tag: "#text", text: words, box: inTop(box), in_viewport: inside, depth: ctx.depth, indexed: false });
  };

  const children = (el, ctx) => {
    for (const child of childrenOf(el)) {
      if (isElement(child)) element(child, ctx);
      else if (child.nodeType === 3) text(child, ctx);
    }
  };

  // Scroll container -> [pages above, pages below]; null if there is nothing to scroll.
  const scroller = (el, style) => {
    if (!/auto|scroll/.test(style.overflowY) || is(el, "html, body, textarea, select, input")) return null;
    const height = el.clientHeight, more = el.scrollHeight - height;
    if (height <= 20 || more <= 4) return null;
    return [el.scrollTop / height, Math.max(0, more - el.scrollTop) / height].map((n) => round(n, 100));
  };

  // What the children of an element inherit: clipping, containing block, opacity, and what they are in.
  const inherit = (el, style, ctx, box, opacity) => {
    const apart = modal !== null && !within(el, modal) && !within(modal, el);
    const next = { ...ctx, opacity, hidden: style.visibility !== "visible", pointer: style.cursor === "pointer",
      inert: ctx.inert || el.inert || el.getAttribute("aria-hidden") === "true" || apart };
    if (style.overflowX !== "visible" && !is(el, "html, body") && !/^(inline|contents)$/.test(style.display)) {
      const more = (overflow) => (overflow === "auto" || overflow === "scroll" ? MARGIN : 0);
      const mx = more(style.overflowX), my = more(style.overflowY);
      next.clip = meet(next.clip, box);
      next.reach = meet(next.reach, [box[0] - mx, box[1] - my, box[2] + mx, box[3] + my]);
    }
    if (style.position !== "static" || style.transform !== "none") next.block = { clip: next.clip, reach: next.reach };
    return next;
  };

  // What the pass over a frame's own document needs to know.
  const frameFacts = (el, box, part, covered) => {
    const { x, y, zoom } = contentOf(el), from = [x, y, x, y];
    return { x: x * scale + dx, y: y * scale + dy, scale: zoom * scale, covered,
      clip: meet(box, part).map((edge, i) => (edge - from[i]) / zoom) };
  };

  const element = (el, outer) => {
    if (hides(el)) { // what it holds stands for it
      for (const child of childNodes(el)) if (isElement(child)) element(child, outer);
      return;
    }
    const tag = el.localName;
    if (SKIP.has(tag)) return;
    const style = getComputedStyle(el);
    if (style.display === "none" || (style.display !== "contents" && !el.checkVisibility())) return;
    const opacity = outer.opacity * parseFloat(style.opacity);
    stats.total += 1;
    if (opacity < 0.02) return;
    let ctx = outer, box = boxOf(el);
    if (style.position === "fixed") ctx = { ...outer, clip, reach: frame };
    else if (style.position === "absolute") ctx = { ...outer, ...outer.block };
    if (!has(box) && is(el, "a, label") && el.firstElementChild) box = boxOf(el.firstElementChild);
    const shown = style.visibility === "visible" && overlap(box, ctx.reach), inside = shown && overlap(box, ctx.clip);
    const next = inherit(el, style, ctx, box, opacity);
    if (tag === "img" && shown) stats.images += 1;
    if (tag.includes("-") && shown && !shadow(el) && !list(el.childNodes).some(showsIn)) sealed = true;

    const why = nature(el, style, ctx), root = shadow(el), pages = shown ? scroller(el, style) : null;
    const framed = isFrame(el), idle = next.inert || covered || off(el);
    const wanted = shown && !idle && ((framed && sizeOf(box).every((length) => length >= 100)) || why !== "");
    const can = wanted && (framed || !inside || reachable(el, ctx.clip));
    const greyed = shown && off(el) && why !== "";
    let line = null;
    if (can || greyed || pages || (framed && shown) || root) {
      const shadowMarker = el.shadowRoot ? "shadow-open" : "shadow-closed";
      const marker = [framed && "iframe", root && shadowMarker, pages && "scroll"].find(Boolean) || null;
      if (recycled(ids.get(el), el)) { nodes.delete(ids.get(el)); ids.delete(el); }
      line = put(el, { tag, indexed: can, role: el.getAttribute("role"), attributes: attributesOf(el),
        text: why !== "" ? nameOf(el) : "", value: shownValue(el), marker, scroll_pages: pages, box: inTop(box),
        in_viewport: inside, depth: outer.depth });
      if (can && tag !== "iframe") shownAs.set(line.id, [meaning(el, line.text), scrolled(el)]);
      if (tag === "select") line.options = list(el.options, optionText);
      if (framed) {
        line.frame = frameFacts(el, box, ctx.clip, idle || (inside && !reachable(el, ctx.clip)));
        line.indexed = can && !line.frame.covered;
      }
      next.depth = outer.depth + 1;
    }
    if (can && (WHOLE.has(tag) || ROLES.has(el.getAttribute("role")))) next.whole = true;
    if (pages) stats.scrolls += 1;
    if (framed) stats.iframes += 1;
    if (root) stats[el.shadowRoot ? "open" : "closed"] += 1;
    if (CHILDLESS.has(tag)) return;

    const at = lines.length;
    children(el, next);
    if (line) settle(line, at, why === "listener" ? "all" : root && "one", pages && !next.inert);
  };

  // After the children: a handler that only serves the controls inside is no target, nor is it or a shadow
  // host if one control is all it shows; a scroller without one needs an index; what shows no words of its
  // own says what it is called.
  const settle = (line, at, serves, scrolls) => {
    const below = lines.slice(at), [only, ...more] = below.filter((other) => other.indexed);
    const reads = (other) => other.tag === "#text", area = ({ box }) => box[2] * box[3];
    const beside = below.some((other) => reads(other) && other.depth <= only?.depth);
    const bare = only && !more.length && (area(only) > 0.8 * area(line) || !beside);
    if (line.indexed && ((serves === "all" && more.length) || (serves && bare))) line.indexed = false;
    const wordless = !below.some(reads) && !["aria-label", "title", "alt"].some((name) => line.attributes[name]);
    if (line.indexed && line.text && wordless) line.attributes["aria-label"] = line.text;
    if (!line.indexed && scrolls && !only && !covered) line.indexed = true;
    const empty = line.marker === null || (line.marker.startsWith("shadow") && lines.length === at);
    if (!line.indexed && !line.attributes.disabled && empty) {
      for (const other of below) other.depth -= 1;
      lines.splice(at - 1, 1);
    }
  };

  const start = { depth: 0, clip, reach, block: { clip, reach }, opacity: 1, hidden: false, pointer: false,
    inert: false, whole: false };
  if (document.documentElement) element(document.documentElement, start);
  const indexed = lines.filter((line) => line.indexed);
  for (const line of indexed) line.is_new = previous !== null && !previous.has(line.id);
  previous = new Set(indexed.map((line) => line.id));
  stats.interactive = indexed.length;
  stats.links = indexed.filter((line) => line.tag === "a").length;
  for (const id of shownAs.keys()) if (!seen.has(id)) shownAs.delete(id);
  return { token, lines, stats, sealed, title: document.title,
    scroll: window.scrollY, height: window.innerHeight, full: pageScroller()?.scrollHeight ?? 0,
    pdf: document.contentType === "application/pdf" || !!document.querySelector("embed[type='application/pdf']") };
};
// The report as JSON text. A page may have taught arrays, objects and plain values its own JSON: that does
// not count.
const report = (place) => {
  const own = [Object, Array, String, Number, Boolean].map(({ prototype }) =>
    [prototype, Object.getOwnPropertyDescriptor(prototype, "toJSON")]).filter(([, found]) => found);
  for (const [prototype] of own) delete prototype.toJSON;
  try {
    return stringify(observe(place));
  } finally {
    for (const [prototype, found] of own) Object.defineProperty(prototype, "toJSON", found);
  }
};

// ------------------------------------------------------------------------------------------------- readiness
// Whether something is on its way to its place: a transition or animation that ends within a second and
// changes more than colours.
const COLOURS = /color|shadow|outline|filter|fill|stroke/;
const moving = () => document.getAnimations().some((animation) => {
  const rest = (animation.effect?.getComputedTiming().endTime ?? 0) - (animation.currentTime ?? 0);
  const soon = animation.playState === "running" && rest > 0 && rest < 1000;
  return soon && !COLOURS.test(animation.transitionProperty || "");
});
// Resolves when the document is parsed, nothing moves and nothing was added, removed or reworded for `ms`
// since `ago` ms before the call, or after `max`; to how often it has called window.open.
const quiet = (ms, max, ago) => new Promise((resolve) => {
  const start = now();
  const look = () => {
    const time = now(), rest = ms - (time - Math.max(state.mutated, start - ago));
    const calm = document.readyState !== "loading" && rest <= 0 && !moving();
    if (calm || time - start >= max) resolve(state.opened);
    else later(look, Math.min(Math.max(rest, 5), max - (time - start)));
  };
  look();
});
