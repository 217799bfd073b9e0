"""The report as a whole: memory, pictures, words, JSON, differences, HTML."""

import dataclasses
import html.parser
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshdp.report._devices import Device
from meshdp.report._diff import diff
from meshdp.report._least import Least, Share
from meshdp.report._memory import Leaf, Memory, remedies
from meshdp.report._pictures import fold, holders_text, leaf_svg, leaf_text, mesh_svg, mesh_text
from meshdp.report._report import Report, report, report_compiled

HAND = Device(kind="hand", flops=1e12, memory=1e11, link=1e10, network=1e9, memory_bytes=10**9)
WIDTH = 512


def make_mesh(**sizes) -> Mesh:
    shape = tuple(sizes.values())
    return Mesh(
        np.array(jax.devices()).reshape(shape),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(shape),
    )


SPLIT = P("fsdp")


def compile_step(mesh, *, spec=SPLIT, moments=SPLIT, lost=False):
    """SGD with momentum on one matrix; `lost` returns nothing that fits the moment."""

    def step(state, batch, unused):
        loss = lambda w: jnp.mean((batch["x"] @ w) ** 2)
        grad = jax.grad(loss)(state["params"])
        moment = 0.9 * state["opt_state"] + grad
        new = {"params": state["params"] - 0.1 * moment, "opt_state": moment}
        if lost:
            new["params"] = new["params"].astype(jnp.bfloat16)
        return new, loss(state["params"])

    on = lambda s: NamedSharding(mesh, s)
    state = {"params": on(spec), "opt_state": on(moments)}
    step = jax.jit(
        step,
        in_shardings=(state, on(P(("data", "fsdp"))), None),
        out_shardings=(state, None),
        donate_argnums=0,
    )
    f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    square = f32(WIDTH, WIDTH)
    return step.lower({"params": square, "opt_state": square}, {"x": f32(16, WIDTH)}, f32(3))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, fsdp=4)


@pytest.fixture(scope="module")
def compiled(mesh):
    return compile_step(mesh).compile()


@pytest.fixture(scope="module")
def done(compiled, mesh):
    return report_compiled(compiled, mesh, device=HAND, name="sgd")


def test_memory_is_told_apart_by_role_and_counts_one_device(done):
    quarter = WIDTH * WIDTH  # four bytes each, a fourth of them
    assert done.memory.by_role == {
        "optimizer state": quarter,
        "parameters": quarter,
        "batch": 4 * 2 * WIDTH,
    }
    assert done.memory.alias_bytes == 2 * quarter
    assert done.memory.argument_bytes == 2 * quarter + 4 * 2 * WIDTH


def test_an_argument_that_is_not_used_holds_nothing(done):
    assert [a.path for a in done.memory.leaves] == [
        "state['opt_state']",
        "state['params']",
        "batch['x']",
    ]


def test_each_leaf_says_who_holds_which_piece(done):
    leaf = done.memory.leaves[1]
    assert (leaf.shape, leaf.tiles, leaf.spec) == ((512, 512), (4, 1), "P('fsdp')")
    assert leaf.holders == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (leaf.bytes, leaf.device_bytes) == (4 * 512 * 512, 512 * 512)


def test_a_replicated_leaf_is_told_which_split_would_fit(mesh):
    compiled = compile_step(mesh, spec=P(), moments=P(None, "fsdp")).compile()
    moments, params, batch = report_compiled(compiled, device=HAND).memory.leaves
    assert params.could_split == ("dimension 0 over fsdp=4, saving 786432 bytes per device")
    assert moments.could_split == batch.could_split == ""


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donation_in_vain_is_named(mesh):
    lost = report_compiled(compile_step(mesh, lost=True).compile(), mesh, device=HAND)
    # One float32 comes out: the first of the two donated arguments gives its memory.
    assert [a.path for a in lost.memory.leaves if a.lost_donation] == ["state['params']"]
    assert "Donated in vain, 262 kB: state['params']" in str(lost)


def test_roles_can_be_given_by_pattern(compiled, mesh):
    roles = {r"opt_state": "other"}
    named = report_compiled(compiled, mesh, device=HAND, roles=roles)
    assert sorted(named.memory.by_role) == ["batch", "other", "parameters"]


def test_the_mesh_is_found_in_the_program(compiled):
    assert report_compiled(compiled, device=HAND).mesh == {"data": 2, "fsdp": 4}


def test_a_program_without_a_mesh_asks_for_one():
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    with pytest.raises(ValueError) as e:
        report_compiled(compiled)
    assert str(e.value) == (
        "No argument or result of this program has a NamedSharding, so its mesh is not known. "
        "Pass it: report_compiled(compiled, mesh)."
    )


def test_a_function_is_no_compiled_program(mesh):
    with pytest.raises(TypeError) as e:
        report_compiled(len, mesh)
    assert str(e.value) == (
        "Expected a compiled step, as from jax.jit(f).lower(*args).compile(); got "
        "builtin_function_or_method. For a "
        "step that is not compiled yet, use meshdp.report(step, *args)."
    )


def test_a_plain_function_is_compiled_for_its_arguments(mesh):
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P(("data", "fsdp"))))
    found = report(lambda x: x.sum(), x, device=HAND)
    assert [(c.kind, c.axes) for c in found.collectives] == [("all-reduce", ("data", "fsdp"))]
    assert found.least is None


def test_options_that_cannot_be_are_named_all_at_once(compiled, mesh):
    with pytest.raises(TypeError) as e:
        report_compiled(compiled, {"data": 2}, device="H100", roles={"(": "weights"}, seconds=0)  # pyright: ignore
    assert str(e.value) == (
        "The options of the report are wrong:\n"
        "  `mesh` must be a jax.sharding.Mesh, or None; got {'data': 2}\n"
        "  `device` must be a meshdp.Device(kind=..., flops=..., memory=..., link=..., "
        "network=...), or None; got 'H100'\n"
        "  `roles`: '(' is not a regular expression: missing ), unterminated subpattern at "
        "position 0\n"
        "  `roles`: '(' has the role 'weights'; there are parameters, optimizer state, batch, "
        "other\n"
        "  `seconds` must be a measured time above 0; got 0"
    )
    with pytest.raises(ValueError) as e:
        report_compiled(compiled, mesh, device=dataclasses.replace(HAND, flops=0.0))
    assert str(e.value) == (
        "The options of the report are wrong:\n  `device.flops` must be above 0; got 0.0"
    )


def test_a_number_is_no_step():
    with pytest.raises(TypeError) as e:
        report(3)
    assert str(e.value) == "Expected a step, such as meshdp.distributed returns; got int."


LEAF = Leaf(
    path="params['w']",
    role="parameters",
    shape=(1024, 1024),
    dtype="float32",
    bytes=4 * 2**20,
    device_bytes=4 * 2**20,
    spec="P()",
    tiles=(1, 1),
    holders=(tuple(range(8)),),
)
HELD = Memory(
    argument_bytes=4 * 2**20,
    output_bytes=4 * 2**20,
    alias_bytes=4 * 2**20,
    temp_bytes=64 * 2**20,
    code_bytes=0,
    leaves=(LEAF,),
)


def test_what_fits_needs_no_remedy():
    assert remedies(HELD, 68 * 2**20, {"data": 8}, 16) == ()


def test_what_does_not_fit_is_told_what_each_change_leaves():
    found = remedies(HELD, 30 * 2**20, {"data": 8}, 64)
    mebi = [(r.change, r.predicted_bytes / 2**20, r.fits) for r in found]
    assert mebi == [
        ("fsdp=8 instead of copies", 64.5, False),  # 4 of 68 become 0.5
        ("accumulation in 2", 36.0, False),
        ("accumulation in 4", 20.0, True),
        ("remat of each of 64 layers", 20.0, True),  # 2/sqrt(64) of 64, and 4
    ]


def test_temporaries_do_not_shrink_below_the_gradients():
    tight = dataclasses.replace(HELD, temp_bytes=8 * 2**20)
    found = {r.change: r.predicted_bytes for r in remedies(tight, 2**20, {"data": 8}, 1)}
    assert found["accumulation in 32"] == 8 * 2**20  # 4 of arguments, 4 of gradients


def numbered(k, **changes):
    return dataclasses.replace(LEAF, path=f"blocks[{k}].w", **changes)


def test_layers_that_are_alike_are_folded_and_others_are_not():
    odd = numbered(3, shape=(8, 8))
    folded = fold([numbered(0), numbered(1), numbered(2), odd, LEAF])
    assert [(f.path, f.count) for f in folded] == [
        ("blocks[0..2].w", 3),
        ("blocks[3].w", 1),
        ("params['w']", 1),
    ]


def test_device_numbers_are_shortened_to_runs():
    assert holders_text((0, 1, 2, 3, 6, 8, 9)) == "0-3,6,8-9"


def test_the_picture_of_a_leaf_shows_the_devices_of_each_piece():
    cut = dataclasses.replace(LEAF, tiles=(2, 2), holders=((0, 4), (1, 5), (2, 6), (3, 7)))
    assert leaf_text(cut) == (
        "+-----+-----+\n| 0,4 | 1,5 |\n+-----+-----+\n| 2,6 | 3,7 |\n+-----+-----+"
    )
    assert re.findall(r">([\d,]+)</text>", leaf_svg(cut)) == ["0,4", "1,5", "2,6", "3,7"]


def test_a_split_last_dimension_runs_across():
    cut = dataclasses.replace(LEAF, tiles=(1, 2), holders=((0, 1), (2, 3)))
    assert leaf_text(cut) == "+-----+-----+\n| 0-1 | 2-3 |\n+-----+-----+"


def test_the_picture_of_the_mesh_shows_its_device_ids():
    ids = [3, 1, 7, 5, 0, 2, 6, 4]
    assert mesh_text({"data": 2, "fsdp": 1, "tensor": 4}, ids, ("data",)) == (
        "down: data=2; across: tensor=4; over the network: data\n3 1 7 5\n0 2 6 4"
    )
    drawing = mesh_svg({"data": 2, "fsdp": 1, "tensor": 4}, ids, ("data",))
    # Four links down, three across in each of two rows, and one line each in the legend.
    assert drawing.count("<path") == 4 + 2 * 3 + 2
    assert drawing.count("stroke-dasharray") == 4 + 1


def test_json_gives_the_report_back(done):
    assert Report.from_json(done.to_json()) == done


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello", "Expecting value: line 1 column 1 (char 0)"),
        ("3", "a report is an object; this is int"),
        (
            '{"name": "step"}',
            (
                "it has no 'jax_version', 'mesh', 'device_ids', 'slow_axes', 'collectives', "
                "'memory', 'work', 'layers'"
            ),
        ),
    ],
)
def test_other_text_is_no_report(text, why):
    with pytest.raises(ValueError) as e:
        Report.from_json(text)
    assert str(e.value) == (
        f"This text is not what Report.to_json wrote: {why}. Write it again with "
        "path.write_text(report.to_json())."
    )


def test_the_words_say_what_is_measured_and_what_is_predicted(compiled, mesh):
    text = str(report_compiled(compiled, mesh, device=HAND, name="sgd", seconds=0.5))
    assert text.splitlines()[0] == "sgd"
    assert "took 500 ms (measured), model flops utilisation" in text
    assert "(predicted)" in text
    assert "Predicted, none of it measured, by making one mesh axis longer." in text
    assert "over the network" not in text


def test_less_than_the_least_is_explained(done):
    words = lambda sent: str(
        dataclasses.replace(done, least=Least((Share(("fsdp",), 100, sent, "why"),)))
    )
    said = "Below 1: a weight that the formula gathers twice was gathered once."
    assert said in words(80)
    assert said not in words(100)


def test_a_branch_and_a_loop_of_unknown_length_are_marked_in_the_list(done):
    first, *_ = done.collectives
    text = lambda **changes: str(
        dataclasses.replace(done, collectives=(dataclasses.replace(first, **changes),))
    )
    row = lambda text: next(x for x in text.splitlines() if "f32[" in x).split()
    assert "<=1" in row(text(conditional=True)) and "branch" in row(text(conditional=True))
    assert "?" in row(text(count=None)) and "and 1 more in loops of unknown" in text(count=None)


def test_plain_text_is_what_a_pipe_gets_and_rich_text_a_terminal(done, capsys):
    done.show()
    assert capsys.readouterr().out == str(done) + "\n"
    console = rich.console.Console(width=160, force_terminal=True, record=True)
    console.print(done)
    said = console.export_text()
    assert "Communication by mesh axis" in said and "reduce" in said


def test_only_reports_are_compared(done):
    with pytest.raises(TypeError) as e:
        diff(done, done.to_json())
    assert str(e.value) == (
        "`after` must be a Report, as meshdp.report(step, *args) returns or Report.from_json "
        "reads; got str."
    )


def test_a_report_differs_from_itself_in_nothing(done):
    assert not diff(done, done)
    assert str(diff(done, done)) == "no difference"


def test_a_difference_names_what_changed_and_by_how_much(done, mesh):
    whole = report_compiled(compile_step(mesh, spec=P(), moments=P()).compile(), device=HAND)
    changes = {c.what: (c.before, c.after) for c in diff(done, whole).changes}
    quarter = WIDTH * WIDTH
    assert changes["memory: aliased"] == (2 * quarter, 8 * quarter)
    assert changes["all-gather over fsdp"] == (1, None)
    lines = str(diff(done, whole)).splitlines()
    assert lines[0].split() == ["what", "before", "after", "ratio"]
    assert any(re.fullmatch(r"memory: aliased +524 kB +2.1 MB +4.00x", line) for line in lines)


class Page(html.parser.HTMLParser):
    """Counts tags and collects every address."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "action", "data")]
        if tag not in ("meta", "rect", "path", "polyline", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("rect", "path", "polyline"):
            assert self.open.pop() == tag


def test_the_html_is_one_file_that_loads_nothing(done, tmp_path):
    done.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and page.addresses == []
    assert "script" not in page.tags and "link" not in page.tags
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    assert page.tags.count("svg") >= 4  # scaling, mesh, and the leaves that are cut


def test_a_notebook_gets_the_same_without_a_document_around_it(done):
    shown = done._repr_html_()
    assert shown.startswith('<div class="meshdp-report">') and "<html" not in shown


def test_names_that_look_like_tags_are_shown_as_they_are(done):
    odd = dataclasses.replace(done, name="<lambda>")
    assert "<h1>&lt;lambda&gt;</h1>" in odd._repr_html_()
