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
  const frames = (n) => new Promise((resolve) => { const step = () => (n-- > 0 ? requestAnimationFrame(step) : resolve()); step(); setTimeout(resolve, 300); });
  const same = (a, b) => a.every((value, i) => Math.abs(value - b[i]) < 1);
  const overflow = (el) => getComputedStyle(el).overflowY;
  const rolls = (el) => /auto|scroll|overlay/.test(overflow(el)) && el.scrollHeight > el.clientHeight + 1;

  // ---------------------------------------------------------------------------------------------- clicking
  const visible = (el) => { // the part of the window in which the element's scroll containers show it
    let clip = dom.view();
    for (let n = dom.parentOf(el); n && n !== document.body; n = dom.parentOf(n)) {
      if (n.nodeType === 1 && n !== document.documentElement && getComputedStyle(n).overflowX !== "visible") clip = dom.meet(clip, dom.boxOf(n.getBoundingClientRect()));
    }
    return clip;
  };
  // The next press is meant for one node. Where it would reach another, because the page moved at the last moment, the page does not get it.
  const AIM_MS = 5000;
  let aim = null;
  for (const type of ["pointerdown", "mousedown", "pointerup", "mouseup", "click", "auxclick", "dblclick", "contextmenu"]) {
    window.addEventListener(type, (event) => {
      if (aim && now() > aim.until) aim = null;
      if (!aim || !event.isTrusted) return;
      if (type === "pointerdown") {
        aim.hit = dom.hitAt(event.clientX, event.clientY) || document.documentElement;
        aim.missed = !aim.el || !dom.leadsTo(aim.hit, aim.el);
      }
      if (aim.missed) { event.preventDefault(); event.stopImmediatePropagation(); }
    }, true);
  }
  const pressed = () => { // what became of it
    const { missed, hit } = aim || { missed: false };
    aim = null;
    return { missed: missed ? `moved at the last moment: ${describe(hit)} is in its place` : missed === undefined ? "was covered at the last moment" : "" };
  };
  // Scrolls the element into view where it is not, waits until it stands still, and gives the point to click: {x, y, what, tag, type, ...}.
  const prepare = async (id) => {
    const el = find(id);
    if (!el) return GONE;
    const fact = { tag: el.localName, type: el.type || "", what: describe(el), disabled: dom.disabled(el), readonly: !!el.readOnly, editable: el.isContentEditable,
      combobox: el.getAttribute("role") === "combobox" || el.hasAttribute("aria-autocomplete") || el.hasAttribute("list"), opened: dom.state.opened,
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
    aim = { el, until: now() + AIM_MS };
    if ("x" in point) return { ...fact, ...point };
    return { ...fact, error: point.blocker ? `is covered by ${describe(point.blocker)}` : "cannot be scrolled into view" };
  };
  // Where the content of a frame's element starts in this document, and whether a click at (x, y) of the content would reach the frame.
  const frameAt = (id, x, y) => {
    const el = find(id);
    if (!el) return GONE;
    const box = el.getBoundingClientRect(), style = getComputedStyle(el);
    const at = { x: x + box.left + el.clientLeft + parseFloat(style.paddingLeft), y: y + box.top + el.clientTop + parseFloat(style.paddingTop) };
    const hit = dom.hitAt(at.x, at.y);
    aim = { el: null, until: now() + AIM_MS }; // a press on the frame's content is none in this document
    return hit === el ? at : { ...at, error: `is covered by ${describe(hit)}` };
  };
  const reveal = (id) => { find(id)?.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" }); return {}; };

  const check = (id) => (find(id) ? {} : GONE);

  // ------------------------------------------------------------------------------------------ typing, values
  const valueOf = (el) => (text(el) ? el.value : el.isContentEditable ? el.innerText.replace(/\n$/, "") : null);
  const read = (id) => { const el = find(id); return el ? { value: valueOf(el), max: el.maxLength ?? -1 } : GONE; };
  // Gives the element the focus and, where `clear`, selects all it holds; else puts the caret to its end.
  const focus = (id, clear) => {
    const el = find(id);
    if (!el) return GONE;
    const active = () => { let a = document.activeElement; while (a && dom.shadow(a)?.activeElement) a = dom.shadow(a).activeElement; return a; };
    if (active() !== el && !(el.isContentEditable && dom.within(active(), el))) el.focus({ preventScroll: true });
    const focused = active();
    if (focused !== el && !(el.isContentEditable && focused && focused.isContentEditable && dom.within(focused, el))) {
      return text(focused || el) && dom.within(el, focused) ? focus(dom.idOf(focused), clear) : { error: "does not take the focus, so it cannot be typed into" };
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
    return { id: dom.idOf(focused), value: valueOf(el) ?? valueOf(focused) };
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
  const seen = (el) => el.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && el.getClientRects().length > 0;
  const listOf = (el) => { // where a custom dropdown keeps its options
    const linked = (el.getAttribute("aria-controls") || el.getAttribute("aria-owns") || "").split(/\s+/).map((id) => id && document.getElementById(id));
    const places = [...linked, el, el.closest("[role=listbox], [role=menu]"), ...document.querySelectorAll("[role=listbox], [role=menu]")];
    return places.find((place) => place && place.querySelector(OPTION) && list(place.querySelectorAll(OPTION)).some(seen)) || null;
  };
  const options = (id) => {
    const el = find(id);
    if (!el) return GONE;
    if (el.localName === "select") {
      const off = (o) => o.disabled || !!o.closest("optgroup")?.disabled;
      const all = list(el.options, (o, i) => ({ id: i, text: squeeze(o.text), value: o.value, chosen: o.selected, off: off(o) }));
      return { native: true, disabled: dom.disabled(el), options: all };
    }
    const place = listOf(el), found = place ? list(place.querySelectorAll(OPTION)).filter(seen) : [];
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
    if (!find(id)) return { chosen: null }; // the page put another element in its place
    return { chosen: list(el.selectedOptions, (o) => squeeze(o.text)), same: el.options[number] === option && option.selected };
  };

  // ---------------------------------------------------------------------------------------------- scrolling
  const main = () => {
    const page = document.scrollingElement || document.documentElement;
    const locked = [document.documentElement, document.body].some((el) => el && /hidden|clip/.test(overflow(el)));
    if (!locked && page.scrollHeight > window.innerHeight + 1) return page;
    const panes = list(document.querySelectorAll("*")).filter((el) => rolls(el) && seen(el));
    const area = (el) => { const r = dom.meet(dom.boxOf(el.getBoundingClientRect()), dom.view()); return dom.has(r) ? (r[2] - r[0]) * (r[3] - r[1]) : 0; };
    return panes.sort((a, b) => area(b) - area(a))[0] || page;
  };
  // Scrolls the page (id null) or the nearest scroll container of a node by a share of its height; `moved` in px.
  const scroll = async (id, pages) => {
    let box = id === null ? main() : find(id), height = window.innerHeight;
    if (!box) return GONE;
    if (id !== null) {
      while (box && !(box.nodeType === 1 && rolls(box) && box !== document.body)) box = dom.parentOf(box);
      box ??= main();
      if (box !== document.scrollingElement) height = box.clientHeight;
    }
    const before = box.scrollTop;
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
      for (const child of dom.shadow(node)?.childNodes ?? node.childNodes) walk(child);
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
      parts.push(`<${name}${span}${tag === "a" && node.href ? ` href="${escape(String(node.href))}"` : ""}${tag === "img" ? ` alt="${escape(node.alt)}"` : ""}>`);
      if (VOID.has(tag)) return;
      for (const child of dom.shadow(node)?.childNodes ?? (tag === "slot" && node.assignedNodes().length ? node.assignedNodes() : node.childNodes)) walk(child);
      parts.push(`</${name}>`);
    };
    if (document.body) walk(document.body);
    return parts.join("");
  };

  dom.act = { check, prepare, pressed, frameAt, reveal, read, focus, set, fileField, options, choose, scroll, scrollToText, html, find };
})();
