// A count of what a person could click or type into, made in the page and on purpose in another way than rmsweb/browser/observe.js.
// `indexed`: numbers of the nodes with an index. The elements that Chromium knows a click listener of stand in window.__heard.
(indexed) => {
  const marked = new Set(indexed.map((id) => window.__rms.nodeOf(id)).filter(Boolean)), heard = window.__heard ?? new Set();
  const CONTROL = "button, input:not([type=hidden]), select, textarea, summary, a[href], [contenteditable=''], [contenteditable=true]";
  const ROLES = "button link menuitem menuitemradio menuitemcheckbox option radio checkbox switch tab textbox combobox slider spinbutton searchbox treeitem";
  const WIDGET = ROLES.split(" ").map((role) => `[role=${role}]`).join(), ACTIVE = "[onclick], [onmousedown], [onpointerdown]";
  const cursor = (el) => el && getComputedStyle(el).cursor === "pointer";
  const shut = (el) => el.matches(":disabled, [inert] *, [inert], [aria-hidden=true] *, [aria-hidden=true]");
  const parents = (el) => { const all = []; for (let n = el; n; n = n.parentElement) all.push(n); return all; };

  // It can be seen in the window or within 1,000 px above and below, and where that can be tested nothing lies over it.
  const near = (el) => {
    const r = el.getBoundingClientRect();
    const away = (b, by) => r.right < b.left + 2 || r.left > b.right - 2 || r.bottom < b.top + 2 - by || r.top > b.bottom - 2 + by;
    if (r.width < 2 || r.height < 2 || getComputedStyle(el).visibility !== "visible") return false;
    if (away({ left: 0, top: 0, right: innerWidth, bottom: innerHeight }, 1000) || parents(el).some((n) => getComputedStyle(n).opacity === "0")) return false;
    const cuts = (n) => n !== document.body && n !== document.documentElement && /hidden|clip/.test(getComputedStyle(n).overflow);
    if (parents(el.parentElement).some((n) => cuts(n) && away(n.getBoundingClientRect(), 0))) return false;
    const points = [0.5, 0.2, 0.8].flatMap((x) => [0.5, 0.2, 0.8].map((y) => [r.left + x * r.width, r.top + y * r.height]));
    const inside = points.filter(([x, y]) => x >= 0 && y >= 0 && x < innerWidth && y < innerHeight);
    const reached = (hit) => hit && (el.contains(hit) || (hit.contains(el) && hit.matches("a, button, label")));
    return inside.length === 0 || inside.some(([x, y]) => reached(document.elementFromPoint(x, y)));
  };

  const all = Array.from(document.body.querySelectorAll("*")).filter((el) => near(el) && !shut(el) && !el.closest("svg *"));
  const controls = all.filter((el) => el.matches(`${CONTROL}, ${WIDGET}`));
  const clickable = (el) => heard.has(el) || el.matches(ACTIVE) || (cursor(el) && !cursor(el.parentElement));
  const others = all.filter((el) => !el.closest(`${CONTROL}, ${WIDGET}`) && clickable(el) && !controls.some((control) => el.contains(control)));
  const expected = [...controls, ...others.filter((el) => !others.some((other) => other !== el && el.contains(other)))];

  const whole = (n, el) => n.matches(`a, button, summary, label, ${WIDGET}`) || (!controls.includes(el) && clickable(n)); // a click on n is one on el
  const known = (el) => marked.has(el) || parents(el).some((n) => marked.has(n) && whole(n, el)) || Array.from(el.labels ?? []).some((n) => marked.has(n))
    || (!controls.includes(el) && Array.from(marked).some((n) => el.contains(n)));
  const meant = (el) => el.matches(`${CONTROL}, ${WIDGET}, ${ACTIVE}, audio, video`) || (el.localName === "label" && el.control) || heard.has(el) || cursor(el);
  const tell = (el) => `<${el.localName} class="${String(el.getAttribute("class")).slice(0, 40)}"> ${(el.textContent || "").trim().slice(0, 30)}`;
  const found = Array.from(marked);
  return { expected: expected.length, indexed: found.length, missing: expected.filter((el) => !known(el)).map(tell),
    noise: found.filter((el) => !meant(el)).map(tell), besides: found.filter((el) => meant(el) && !expected.includes(el)).map(tell) };
}
