// What actions need of the page: a node's click point, its value, its options, scrolling, finding a text, the page as plain HTML.
//
// Every function takes the number that dom.js gave to a node, and answers with plain data; {error} says in words why it cannot be done.
(() => {
  const dom = window.__rms;
  if (!dom || dom.act) return;
  const { squeeze, list, now } = dom;
  const words = (text, limit = 60) => { const s = squeeze(text); return s.length > limit ? s.slice(0, limit) + "..." : s; };
  const describe = (el) => {
    if (!el) return "nothing";
    if (dom.hides(el)) return "<form>";
    const name = words(dom.nameOf(el));
    const id = el.getAttribute("id");
    return `<${el.localName}${id ? ` id=${words(id)}` : ""}>` + (name ? ` "${name}"` : "");
  };
  const find = (id) => {
    const node = dom.nodeOf(id);
    return node && node.isConnected && node.ownerDocument === document ? node : null;
  };
  const GONE = { error: "is no longer on the page" };
  const text = (el) => el.localName === "input" || el.localName === "textarea";
  const still = matchMedia("(scripting: none)").matches; // a sandboxed frame: no timer runs in it and no listener hears anything
  const frames = (n) => new Promise((resolve) => {
    const step = () => (n-- > 0 && !still ? requestAnimationFrame(step) : resolve());
    step();
    dom.later(resolve, 300);
  });
  const same = (a, b) => a.every((value, i) => Math.abs(value - b[i]) < 1);
  const overflow = (el) => getComputedStyle(el).overflowY;
  const rolls = (el) => /auto|scroll|overlay/.test(overflow(el)) && el.scrollHeight > el.clientHeight + 1;

  // ---------------------------------------------------------------------------------------------- clicking
  const visible = (el) => { // the part of the window in which the element's scroll containers show it
    let clip = dom.view();
    for (let n = dom.parentOf(el); n && n !== document.body; n = dom.parentOf(n)) {
      const clips = n.nodeType === 1 && n !== document.documentElement && getComputedStyle(n).overflowX !== "visible";
      if (clips) clip = dom.meet(clip, dom.boxOf(n.getBoundingClientRect()));
    }
    return clip;
  };
  const suggests = (el) => el.getAttribute("role") === "combobox" || el.hasAttribute("aria-autocomplete");
  // The next press is meant for one node. Where it would reach another, because the page moved at the last moment, the page does not get it. Where the page
  // moves between press and release, the browser gives the click to what holds both nodes, which nobody aimed at: the page does not get that click either.
  // A click that goes to such a node while the element still lies under the pointer is the page's own doing: it captured the pointer.
  const AIM_MS = 5000;
  let aim = null; // stays null where no listener runs
  const aimAt = (el) => { aim = still ? null : { el, until: now() + AIM_MS }; };
  const around = (hit, el) => { // what holds the pressed node and is not the element
    const found = new Set();
    for (let n = hit; n; n = dom.parentOf(n)) if (n instanceof Element && !dom.leadsTo(n, el)) found.add(n);
    return found;
  };
  const lies = (el, x, y) => { const hit = dom.hitAt(x, y); return !!hit && el.isConnected && dom.leadsTo(hit, el); };
  for (const type of ["pointerdown", "mousedown", "pointerup", "mouseup", "click", "auxclick", "dblclick", "contextmenu"]) {
    window.addEventListener(type, (event) => {
      if (aim && now() > aim.until) aim = null;
      if (!aim || !event.isTrusted) return;
      if (type === "pointerdown") {
        aim.hit = dom.hitAt(event.clientX, event.clientY) || document.documentElement;
        aim.missed = !aim.el || !dom.leadsTo(aim.hit, aim.el);
        aim.around = aim.missed ? null : around(aim.hit, aim.el);
      }
      const stray = type === "click" && aim.around?.has(event.composedPath()[0]) && !lies(aim.el, event.clientX, event.clientY);
      if (type === "click" && !stray) aim.clicked = true;
      if (aim.missed || stray) { event.preventDefault(); event.stopImmediatePropagation(); }
    }, true);
  }
  const pressed = () => { // what became of it
    const { missed, hit, clicked } = aim || { missed: false, clicked: true };
    aim = null;
    return { clicked: !!clicked,
      missed: missed ? `moved at the last moment: ${describe(hit)} is in its place` : missed === undefined ? "was covered at the last moment" : "" };
  };
  // Scrolls the element into view where it is not, waits until it stands still, and gives the point to click: {x, y, what, tag, type, ...}.
  const prepare = async (id) => {
    const el = find(id);
    if (!el) return GONE;
    dom.state.invalid = [];
    const fact = { tag: el.localName, type: el.type || "", role: el.getAttribute("role") || "", what: describe(el), disabled: dom.disabled(el),
      readonly: !!el.readOnly, editable: el.isContentEditable,
      combobox: suggests(el) || el.hasAttribute("list"), suggests: suggests(el), opened: dom.state.opened,
      blank: el.closest?.("a[target]:not([target=_self]):not([target=_top]):not([target=_parent])")?.target || "" };
    if (!el.checkVisibility({ visibilityProperty: true })) return { ...fact, error: "is not visible any more" };
    let point = dom.pointOf(el, visible(el));
    if (!("x" in point)) {
      el.scrollIntoView({ block: "center", inline: "nearest", behavior: "instant" });
      point = dom.pointOf(el, visible(el));
    }
    for (let tries = 0; tries < 10; tries++) { // moving things are waited for
      const before = dom.boxOf(el.getBoundingClientRect());
      await frames(1);
      if (!find(id)) return GONE;
      if (same(before, dom.boxOf(el.getBoundingClientRect()))) break;
      point = dom.pointOf(el, visible(el));
    }
    point = dom.pointOf(el, visible(el));
    aimAt(el);
    if ("x" in point) return { ...fact, ...point };
    return { ...fact, error: point.blocker ? `is covered by ${describe(point.blocker)}` : "cannot be scrolled into view" };
  };
  // Where the content of a frame's element starts in this document, and whether a click at (x, y) of the content would reach the frame.
  const frameAt = (id, x, y) => {
    const el = find(id);
    if (!el) return GONE;
    const start = dom.contentOf(el), at = { x: x * start.zoom + start.x, y: y * start.zoom + start.y };
    const hit = dom.hitAt(at.x, at.y);
    aimAt(null); // a press on the frame's content is none in this document
    return hit === el ? at : { ...at, error: `is covered by ${describe(hit)}` };
  };
  const reveal = (id) => {
    const el = find(id);
    el?.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    return el ? {} : GONE;
  };
  const check = (id) => (find(id) ? {} : GONE);
  // Whether a click at a point would reach the element now.
  const reaches = (id, x, y) => {
    const el = find(id);
    return !el ? GONE : lies(el, x, y) ? { yes: true } : { yes: false, hit: describe(dom.hitAt(x, y)) };
  };

  // What the browser said against sending a form since the last `prepare`, in a bubble that is not part of the page.
  const refused = () => ({ words: dom.state.invalid.splice(0).map((el) => `${describe(el)}: ${el.validationMessage}`).slice(0, 5) });

  // ------------------------------------------------------------------------------------------ typing, values
  const valueOf = (el) => (text(el) ? el.value : el.isContentEditable ? el.innerText.replace(/\n$/, "") : null);
  const read = (id) => { const el = find(id); return el ? { value: valueOf(el), max: el.maxLength ?? -1 } : GONE; };
  // Gives the element the focus and, where `clear`, selects all it holds; else puts the caret to its end.
  const focus = (id, clear) => {
    let el = find(id);
    if (!el) return GONE;
    const active = () => { let a = document.activeElement; while (a && dom.shadow(a)?.activeElement) a = dom.shadow(a).activeElement; return a; };
    const takes = (node) => node && (text(node) || node.isContentEditable);
    // The click gave the focus to the field that belongs to the element, perhaps to one that only now appeared over it.
    if (!takes(el) || (takes(active()) && !("x" in dom.pointOf(el, visible(el))))) el = active();
    if (!takes(el)) return { error: "takes no text; if it listens to keys, click it and use send_keys" };
    if (active() !== el && !(el.isContentEditable && dom.within(active(), el))) el.focus({ preventScroll: true });
    const focused = active();
    if (focused !== el && !(el.isContentEditable && focused && focused.isContentEditable && dom.within(focused, el))) {
      return { error: "does not take the focus, so it cannot be typed into" };
    }
    if (text(el)) {
      if (clear) el.select();
      else try { el.setSelectionRange(el.value.length, el.value.length); } catch { /* types such as number and email have no caret to set */ }
    } else {
      const range = document.createRange(), selection = getSelection();
      range.selectNodeContents(el);
      if (!clear) range.collapse(false);
      selection.removeAllRanges();
      selection.addRange(range);
    }
    return { id: dom.idOf(focused), what: describe(el), value: valueOf(el) ?? valueOf(focused) };
  };
  const changed = (el) => { for (const type of ["input", "change"]) el.dispatchEvent(new Event(type, { bubbles: true, composed: true })); };
  const setter = (el, name) => { // the native one: frameworks put their own on the element
    const owner = { INPUT: HTMLInputElement, SELECT: HTMLSelectElement, OPTION: HTMLOptionElement }[el.tagName];
    return (value) => Object.getOwnPropertyDescriptor(owner.prototype, name).set.call(el, value);
  };
  // Sets a field that has no text to type (date, time, colour, range) and says what it holds afterwards.
  const set = async (id, value) => {
    const el = find(id);
    if (!el) return GONE;
    el.focus({ preventScroll: true });
    setter(el, "value")(value);
    changed(el);
    await frames(1);
    return { value: el.value };
  };

  const fileField = (id) => { // the file input that an element is, holds, labels or stands beside
    const el = find(id), is = (n) => n && n.localName === "input" && n.type === "file";
    if (!el) return null;
    if (is(el) || is(el.control)) return is(el) ? el : el.control;
    const inner = el.querySelector("input[type=file]"), label = el.closest("label") || el.querySelector("label");
    if (inner || is(label?.control)) return inner || label.control;
    for (let n = el.parentElement, i = 0; n && i < 3; n = n.parentElement, i++) {
      const near = n.querySelectorAll("input[type=file]");
      if (near.length) return near.length === 1 ? near[0] : null;
    }
    return null;
  };

  // ---------------------------------------------------------------------------------------------- dropdowns
  const OPTION = "[role=option], [role=menuitem], [role=menuitemradio], [role=menuitemcheckbox], [role=treeitem]";
  const seen = (el) => el.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && dom.has(dom.boxOf(el.getBoundingClientRect()));
  const LISTS = "[role=listbox], [role=menu]";
  const inside = (place) => { // its displayed options, through slots and shadow roots
    const found = [];
    const walk = (node) => {
      if (node.nodeType === 1 && node.matches(OPTION) && seen(node)) found.push(node);
      dom.childrenOf(node).forEach(walk);
    };
    dom.childrenOf(place).forEach(walk);
    return found;
  };
  const optionsOf = (el) => { // of a dropdown of the page's making, wherever its list is
    const root = el.getRootNode(), ids = (el.getAttribute("aria-controls") || el.getAttribute("aria-owns") || "").split(/\s+/);
    const linked = ids.map((id) => id && (root.getElementById?.(id) || document.getElementById(id)));
    for (const place of [...linked, el, el.closest(LISTS), ...root.querySelectorAll?.(LISTS) ?? [], ...document.querySelectorAll(LISTS)]) {
      const found = place ? inside(place) : [];
      if (found.length) return found;
    }
    return [];
  };
  // Resolves when a field's list of suggestions is shown, or after `ms`.
  const suggestions = async (id, ms) => {
    const end = performance.now() + ms, el = find(id);
    while (el && !still && !optionsOf(el).length && performance.now() < end) await new Promise((resolve) => dom.later(resolve, 20));
    return {};
  };
  const options = (id) => {
    const el = find(id);
    if (!el) return GONE;
    if (el.localName === "select") {
      const off = (o) => o.disabled || !!o.closest("optgroup")?.disabled;
      const all = list(el.options, (o, i) => ({ id: i, text: squeeze(o.text), value: o.value, chosen: o.selected, off: off(o) }));
      return { native: true, disabled: dom.disabled(el), options: all };
    }
    const found = optionsOf(el);
    const on = (o, ...names) => names.some((name) => o.getAttribute(name) === "true");
    return { native: false, disabled: dom.disabled(el), options: found.map((o) => ({ id: dom.idOf(o), text: squeeze(o.textContent), off: on(o, "aria-disabled"),
      value: o.getAttribute("data-value") || "", chosen: on(o, "aria-selected", "aria-checked") })) };
  };
  const choose = async (id, number) => {
    const el = find(id), option = el?.options?.[number];
    if (!option) return GONE;
    el.focus({ preventScroll: true });
    if (el.multiple) setter(option, "selected")(true);
    else setter(el, "selectedIndex")(number);
    changed(el);
    await frames(2);
    return {};
  };

  // ---------------------------------------------------------------------------------------------- scrolling
  const area = (el) => { const r = dom.meet(dom.boxOf(el.getBoundingClientRect()), dom.view()); return dom.has(r) ? (r[2] - r[0]) * (r[3] - r[1]) : 0; };
  const largest = (root) => list(root.querySelectorAll("*")).filter((el) => rolls(el) && seen(el)).sort((a, b) => area(b) - area(a))[0];
  // What scrolls when no element is named: a dialog in the middle of the window, the page, or the largest pane of a page that does not scroll itself.
  const main = () => {
    const page = document.scrollingElement || document.documentElement;
    let pane = null;
    for (let n = dom.hitAt(window.innerWidth / 2, window.innerHeight / 2); n; n = dom.parentOf(n)) {
      if (n.nodeType === 1 && rolls(n)) pane ??= n;
      if (n.nodeType === 1 && n.matches("dialog, [role=dialog], [role=alertdialog]") && (pane ??= largest(n))) return pane;
    }
    const locked = [document.documentElement, document.body].some((el) => el && /hidden|clip/.test(overflow(el)));
    if (!locked && page.scrollHeight > window.innerHeight + 1) return page;
    return largest(document) || page;
  };
  // Scrolls the page (id null) or the nearest scroll container of a node by a share of its height; `moved` in px.
  const scroll = async (id, pages) => {
    let box = id === null ? main() : find(id);
    if (!box) return GONE;
    if (id !== null) {
      while (box && !(box.nodeType === 1 && rolls(box) && box !== document.body)) box = dom.parentOf(box);
      box ??= main();
    }
    const height = box === document.scrollingElement ? window.innerHeight : box.clientHeight, before = box.scrollTop;
    box.scrollBy({ top: pages * height, behavior: "instant" });
    await frames(2);
    const rest = box.scrollHeight - box.clientHeight - box.scrollTop;
    return { moved: box.scrollTop - before, height, above: box.scrollTop / height, below: Math.max(0, rest) / height };
  };
  const scrollToText = async (wanted) => {
    const needle = squeeze(wanted).toLowerCase(), places = [];
    let all = "";
    const walk = (node) => {
      if (node.nodeType === 3) {
        const part = node.data.replace(/\s+/g, " ").toLowerCase();
        places.push([all.length, node]);
        all += all.endsWith(" ") ? part.replace(/^ /, "") : part;
        return;
      }
      if (node.nodeType === 1) {
        if (["script", "style", "noscript", "template", "option", "title"].includes(node.localName) || getComputedStyle(node).display === "none") return;
      }
      const block = node.nodeType === 1 && !/inline|contents/.test(getComputedStyle(node).display);
      if (block && !all.endsWith(" ")) all += " ";
      for (const child of dom.childrenOf(node)) walk(child);
      if (block && !all.endsWith(" ")) all += " ";
    };
    if (!needle || !document.body) return { found: false };
    walk(document.body);
    for (let at = all.indexOf(needle); at >= 0; at = all.indexOf(needle, at + 1)) {
      const node = places.filter(([start]) => start <= at).pop()[1], el = node.parentElement || node.getRootNode().host;
      if (!seen(el) || !el.checkVisibility({ visibilityProperty: true })) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const inside = () => dom.has(dom.meet(dom.boxOf(range.getBoundingClientRect()), visible(el)));
      if (!inside()) el.scrollIntoView({ block: "center", inline: "nearest", behavior: "instant" });
      await frames(1);
      if (inside()) return { found: true };
    }
    return { found: false };
  };

  // ---------------------------------------------------------------------------------------- the page as HTML
  // What is displayed, shadow roots in place; a frame stands as <rms-frame id=..> for its own document.
  const html = () => {
    const parts = [], escape = (s) => s.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");
    const VOID = new Set(["br", "hr", "img", "input", "wbr"]), SKIP = new Set(["script", "style", "noscript", "template", "head", "svg", "datalist"]);
    const walk = (node) => {
      if (node.nodeType === 3) { parts.push(escape(node.data)); return; }
      if (node.nodeType !== 1 || SKIP.has(node.localName) || getComputedStyle(node).display === "none") return;
      const tag = node.localName;
      if (tag === "iframe" || tag === "frame") { parts.push(`<rms-frame id="${dom.idOf(node)}"></rms-frame>`); return; }
      if (tag === "select") { parts.push(escape(list(node.selectedOptions, (o) => squeeze(o.text)).join(", ")) + " "); return; }
      if (tag === "input" || tag === "textarea") {
        if (!["password", "hidden", "file"].includes(node.type)) parts.push(escape(dom.toggles(node) ? (node.checked ? "[x] " : "[ ] ") : node.value + " "));
        return;
      }
      const name = tag.includes("-") ? "div" : tag, kept = ["colspan", "rowspan", "start"].filter((a) => node.hasAttribute(a));
      const span = kept.map((a) => ` ${a}="${escape(node.getAttribute(a))}"`).join("");
      const href = tag === "a" && node.href ? ` href="${escape(String(node.href))}"` : "", alt = tag === "img" ? ` alt="${escape(node.alt)}"` : "";
      parts.push(`<${name}${span}${href}${alt}>`);
      if (VOID.has(tag)) return;
      for (const child of dom.childrenOf(node)) walk(child);
      parts.push(`</${name}>`);
    };
    if (document.body) walk(document.body);
    return parts.join("");
  };

  dom.act = { check, refused, reaches, prepare, pressed, frameAt, reveal, read, focus, set, fileField, options, suggestions, choose, scroll, scrollToText,
    html, find };
})();
