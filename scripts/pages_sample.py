"""What gets an index on ten ordinary pages: documentation, dashboards, component libraries.

    python scripts/pages_sample.py --cache DIR

The pages come in packages of npm and PyPI, which are fetched into DIR unless they are there. They are served
on loopback, and each gives a JSON line. `expected` is a count by other means than observe.js (selectors, the list
of event listeners that Chromium keeps, hit tests). `recall` is the share of it that has an index, itself or
by the link, button or label it belongs to. `noise` is the share of indexed elements that are no control, link
or ARIA widget and show no sign that a click is meant for them. `--verbose` names what is missing, what is
noise, and what else has an index, such as a clickable box around another control.
"""  # noqa: E501

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark_observe import measure, served  # noqa: E402 (a file beside this one)

from rmsweb.browser.chromium import Browser, BrowserOptions  # noqa: E402 (the checkout need not be installed)
from rmsweb.browser.session import Session  # noqa: E402

NPM = {  # package: version
    "admin-lte": "4.0.0-rc3",
    "startbootstrap-sb-admin-2": "4.1.4",
    "material-dashboard": "3.1.0",
    "gentelella": "1.4.0",
    "swagger-ui-dist": "5.17.14",
    "jquery-ui-dist": "1.13.3",
    "fomantic-ui": "2.9.4",
    "tabulator-tables": "6.3.1",
    "gridjs": "6.2.0",
}
PYPI = {"sqlalchemy": "2.0.36"}
PAGES = (
    "admin-lte/dist/index.html",
    "admin-lte/dist/forms/general.html",
    "startbootstrap-sb-admin-2/tables.html",
    "material-dashboard/pages/dashboard.html",
    "gentelella/production/form_advanced.html",
    "swagger-ui-dist/index.html",
    "jquery-ui-dist/index.html",
    "fomantic-ui/examples/homepage.html",
    "sqlalchemy/doc/orm/quickstart.html",
    "made/tables.html",
)
_PEOPLE = (
    "Array.from({length: 200}, (_, i) => "
    "({name: 'Person ' + i, city: ['Rome', 'Oslo', 'Lima'][i % 3], age: 20 + i % 50}))"
)
_API = {
    "openapi": "3.0.0",
    "info": {"title": "Pets", "version": "1"},
    "paths": {
        f"/pets/{name}": {
            how: {"summary": f"{how} {name}", "responses": {}} for how in ("get", "post", "delete")
        }
        for name in ("cats", "dogs", "birds")
    },
}
MADE = {
    "swagger-ui-dist/swagger-initializer.js": (
        "window.onload = () => SwaggerUIBundle({dom_id: '#swagger-ui', "
        "presets: [SwaggerUIBundle.presets.apis, SwaggerUIStandalonePreset], layout: 'StandaloneLayout', "
        f"spec: {json.dumps(_API)}}});"
    ),
    "made/tables.html": f"""<!doctype html><title>Tables</title>\
<link rel=stylesheet href=/tabulator-tables/dist/css/tabulator.css>
<link rel=stylesheet href=/gridjs/dist/theme/mermaid.min.css><div id=one></div><div id=two></div>\
<script src=/tabulator-tables/dist/js/tabulator.js></script>
<script src=/gridjs/dist/gridjs.umd.js></script><script>const data = {_PEOPLE};
new Tabulator('#one', {{data, layout: 'fitColumns', pagination: true, paginationSize: 6, columns: [\
{{title: 'Name', field: 'name', headerFilter: 'input'}},
  {{title: 'City', field: 'city', editor: 'list', editorParams: {{values: ['Rome', 'Oslo']}}}}, \
{{title: 'Age', field: 'age', editor: 'number'}}]}});
new gridjs.Grid({{data, columns: ['name', 'city', 'age'], search: true, sort: true, \
pagination: {{limit: 6}}}})
  .render(document.getElementById('two'));</script>""",
}

COUNT = (Path(__file__).parent / "pages_count.js").read_text(encoding="utf-8")
HEAR = "function () { (window.__heard ??= new Set()).add(this); }"


def fetch(cache: Path) -> None:
    """Fetch and unpack what is not in the cache yet.

    Raises CalledProcessError if a registry does not give a package.
    """
    npm = ["npm", "pack", "--silent"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    commands = {name: [*npm, f"{name}@{version}"] for name, version in NPM.items()}
    commands |= {name: [*pip, f"{name}=={version}"] for name, version in PYPI.items()}
    for name, command in commands.items():
        if (cache / name).is_dir():
            continue
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
            archive = next(path for path in Path(scratch).iterdir() if path.suffix in (".tgz", ".gz"))
            with tarfile.open(archive) as packed:
                packed.extractall(Path(scratch) / "out", filter="data")
            shutil.move(next((Path(scratch) / "out").iterdir()), cache / name)


async def hear(session: Session) -> None:
    """Put every element with a click listener, as Chromium knows them, into window.__heard."""
    cdp = await session.window.cdp()
    document = await cdp.send("Runtime.evaluate", {"expression": "document.documentElement"})
    deep = {"objectId": document["result"]["objectId"], "depth": -1}
    found = (await cdp.send("DOMDebugger.getEventListeners", deep))["listeners"]
    clicks = [one for one in found if one["type"] in ("click", "mousedown", "pointerdown")]
    for node in {one["backendNodeId"] for one in clicks if "backendNodeId" in one}:
        target = (await cdp.send("DOM.resolveNode", {"backendNodeId": node}))["object"]["objectId"]
        await cdp.send("Runtime.callFunctionOn", {"objectId": target, "functionDeclaration": HEAR})


async def sample(cache: Path, verbose: bool) -> None:
    """Print a line for each page."""
    with (
        served({path: text.encode() for path, text in MADE.items()}, cache) as port,
        tempfile.TemporaryDirectory() as folder,
    ):
        async with Browser.launch(BrowserOptions(host_map=f"MAP * 127.0.0.1:{port}")) as browser:
            for page in PAGES:
                session = await Session.open(browser, Path(folder))
                await session.goto(f"http://pages.localhost/{page}")
                await asyncio.sleep(1)
                line: dict[str, Any] = await measure(session, page)
                seen = await session.observe()
                own = [
                    int(node.node_key.split(":")[1])
                    for node in seen.nodes
                    if node.index is not None and node.node_key.startswith("0:")
                ]
                await hear(session)
                found = await session.page.evaluate(COUNT, own)
                missing, noise, besides = found["missing"], found["noise"], found["besides"]
                line |= {
                    "benchmark": "pages",
                    "expected": found["expected"],
                    "recall": round(1 - len(missing) / max(1, found["expected"]), 3),
                }
                line["noise"] = round(len(noise) / max(1, found["indexed"]), 3)
                print(json.dumps(line), flush=True)
                for kind, elements in (("missing", missing), ("noise", noise), ("besides", besides)):
                    for element in elements if verbose else ():
                        print(f"  {kind}: {element}")
                await session.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 3 if a package cannot be fetched."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache",
        type=Path,
        required=True,
        help="folder for the packages, outside the checkout (about 300 MB)",
    )
    parser.add_argument("--verbose", action="store_true", help="name what is missing and what is noise")
    options = parser.parse_args(argv)
    cache = options.cache.resolve()
    if cache.is_relative_to(ROOT):
        parser.error(f"--cache {options.cache} lies inside the checkout {ROOT}; expected another folder")
    cache.mkdir(parents=True, exist_ok=True)
    try:
        fetch(cache)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"pages_sample.py: a package could not be fetched: {error}", file=sys.stderr)
        return 3
    asyncio.run(sample(cache, options.verbose))
    return 0


if __name__ == "__main__":
    sys.exit(main())
