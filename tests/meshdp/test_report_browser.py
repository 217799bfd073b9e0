"""The HTML report in a real browser, headless: on a phone and a desk, light and dark."""

import html
import json
import os
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshdp.report._devices import Device
from meshdp.report._report import report_compiled

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)

# Never skipped in CI: there a missing browser is a fault of the set-up.
pytestmark = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("CI"), reason="no Chromium on this machine"
)

MEASURE = """<script>
const s = getComputedStyle(document.querySelector(".meshdp-report"));
document.title = JSON.stringify({
  page: document.documentElement.scrollWidth, window: window.innerWidth,
  back: s.backgroundColor, ink: s.color,
  tables: document.querySelectorAll("table").length,
  drawn: [...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().height > 20
    && e.getBoundingClientRect().right <= window.innerWidth).length,
  svgs: document.querySelectorAll("svg").length,
});</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    on = lambda *spec: NamedSharding(mesh, P(*spec))
    weights = {f"a_rather_long_name_of_a_layer_{k}": on("fsdp") for k in range(3)}
    step = jax.jit(
        jax.grad(lambda w, x: sum(jnp.sum(jnp.tanh(x @ v)) for v in w.values())),
        in_shardings=(weights, on(("data", "fsdp"))),
        out_shardings=weights,
    )
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    compiled = step.lower(dict.fromkeys(weights, shape), shape).compile()
    hand = Device(kind="hand", flops=1e12, memory=1e11, link=1e10, network=1e9)
    report_compiled(compiled, mesh, device=hand).to_html(path)
    path.write_text(path.read_text(encoding="utf-8") + MEASURE, encoding="utf-8")
    return path


def shown(page, width, scheme):
    run = subprocess.run(
        [
            BROWSER or "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={page.parent / f'profile-{width}-{scheme}'}",
            f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}",
            f"--window-size={width},900",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    titles = re.findall(r"<title>(\{.*?\})</title>", run.stdout, re.DOTALL)
    assert titles, run.stderr[-2000:]
    return json.loads(html.unescape(titles[0]))


@pytest.mark.parametrize(
    "width, scheme, back, ink",
    [
        (390, "dark", "rgb(20, 23, 27)", "rgb(228, 232, 236)"),
        (390, "light", "rgb(255, 255, 255)", "rgb(27, 31, 36)"),
        (1200, "light", "rgb(255, 255, 255)", "rgb(27, 31, 36)"),
    ],
)
def test_the_page_fits_its_window_and_follows_the_colour_scheme(page, width, scheme, back, ink):
    seen = shown(page, width, scheme)
    # Wide tables scroll by themselves; the page never does.
    assert seen["page"] <= seen["window"]
    assert (seen["back"], seen["ink"]) == (back, ink)
    assert seen["tables"] >= 5
    assert seen["drawn"] == seen["svgs"] >= 4
