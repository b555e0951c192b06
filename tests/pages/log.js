// Writes what happens into window.__log: "type id trusted" for each event of a control.
window.__log = [];
for (const type of ["click", "input", "change", "keydown", "submit"]) {
  document.addEventListener(type, (event) => window.__log.push([type, event.target.id || event.target.localName, event.isTrusted, event.key || ""]), true);
}
