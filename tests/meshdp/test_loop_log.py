"""What a run writes down, and where."""

import dataclasses
import io
import json
import sys

import jax
import numpy as np
import pytest

import meshdp
from meshdp.loop import Batches, Console, JsonLines, TensorBoard, _clock, fit

from . import fitting


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    names: tuple = ("a", "b")


@pytest.fixture(scope="module")
def step():
    return fitting.make_step(meshdp.make_mesh(data=2, fsdp=4))


def run(step, steps, log, **kwargs):
    batches = Batches(fitting.make_data(), 16, seed=0)
    return fit(step, fitting.start(step), batches, steps=steps, log=log, **kwargs)


@pytest.fixture(scope="module")
def logged(step, tmp_path_factory):
    """All sinks at once, over two runs of one training."""
    at = tmp_path_factory.mktemp("logged")
    out, records = io.StringIO(), []
    log = lambda: [Console(file=out), at / "log.jsonl", TensorBoard(at / "tb"), records.append]
    for steps in (6, 10):
        run(
            step,
            steps,
            log(),
            log_every=4,
            checkpoint=at / "run",
            evaluate=lambda state: {"loss": 0.25, "accuracy": 0.5},
            config=Settings(),
        )
    return at, out.getvalue(), records


def events(records, kind):
    return [r for r in records if r["event"] == kind]


def test_the_circumstances_are_recorded_at_the_start(logged, step):
    first = events(logged[2], "start")[0]
    assert first["config"] == {"rate": 0.1, "names": ["a", "b"]}
    assert first["mesh"] == {
        "axes": {"data": 2, "fsdp": 4},
        "devices": 8,
        "device_kind": "cpu",
        "platform": "cpu",
    }
    state = jax.tree.leaves(fitting.start(step))
    size = lambda x: x.size * (8 if "key<" in str(x.dtype) else x.dtype.itemsize)
    assert first["layout"] == {
        "rule": "fsdp(min_size=1)",
        "leaves": len(state),
        "numbers": sum(x.size for x in state),
        "bytes": sum(map(size, state)),
        # The model and Adam's two moments are split over four.
        "bytes_per_device": sum(map(size, state)) - 3 * (8 * 16 + 16 * 4) * 4 * 3 // 4,
        "replicated_leaves": len(state) - 6,
    }
    assert first["versions"]["jax"] == jax.__version__
    assert first["command"] == sys.argv
    assert {"git_commit", "git_changed", "processes", "steps"} <= set(first)


def test_each_interval_has_its_figures(logged):
    steps = [r["step"] for r in events(logged[2], "train")]
    assert steps == [1, 4, 6, 7, 8, 10]
    r = events(logged[2], "train")[1]
    assert 0 < r["step_seconds_p50"] <= r["step_seconds_p95"]
    assert r["per_second"] > 0 and r["data_seconds"] >= 0 and r["seconds_left"] >= 0
    assert r["compile_seconds"] > 0
    assert (r["device_bytes"], r["device_bytes_peak"]) == (None, None)  # not told on CPU
    assert {"loss", "grad_norm", "weight", "skipped"} <= set(r)


def test_the_console_has_a_line_for_each_interval(logged):
    lines = logged[1].splitlines()
    count = events(logged[2], "start")[0]["layout"]["numbers"]
    assert lines[0] == (f"state: {count} numbers; mesh: data=2 x fsdp=4 of 8 cpu; steps 0 to 6")
    assert lines[1].startswith("step 1/6  loss ")
    assert lines[3].startswith("step 6/6  loss ") and lines[3].endswith("examples/s  0 s left")
    assert lines[4] == "evaluation after step 6: loss 0.25, accuracy 0.5  best so far"
    assert lines[5] == "ended after step 6"
    assert lines[6].startswith("resumed from the checkpoint of step 6 in ")
    assert lines[8].startswith("step 7/10  loss ")


def test_json_lines_go_on_where_they_were(logged):
    lines = (logged[0] / "log.jsonl").read_text().splitlines()
    assert [(r["event"], r["step"]) for r in map(json.loads, lines)] == [
        (r["event"], r["step"]) for r in logged[2]
    ]


def test_tensorboard_has_the_numbers(logged):
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((logged[0] / "tb").iterdir()):
        data = path.read_bytes()
        while data:  # length, checksum, event, checksum
            size = int.from_bytes(data[:8], "little")
            found += Event.FromString(data[12 : 12 + size]).summary.value
            data = data[16 + size :]
    losses = [v.simple_value for v in found if v.tag == "train/loss"]
    np.testing.assert_allclose(losses, [r["loss"] for r in events(logged[2], "train")], 1e-6)
    assert [v.simple_value for v in found if v.tag == "evaluation/accuracy"] == [0.5, 0.5]


def test_a_line_cut_by_a_kill_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "train"}\n{"ev')
    sink = JsonLines(path)
    sink.write({"event": "end", "loss": float("nan")})
    sink.close()
    assert path.read_text() == '{"event": "train"}\n{"ev\n{"event": "end", "loss": "nan"}\n'


def test_every_scalar_that_the_step_returns_is_a_metric():
    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(n, batch):
        return n + 1, {"skipped": n, "aux": (batch[0], batch), "key": jax.random.key(0)}

    records = []
    fit(step, jax.numpy.int32(0), [np.ones(8)] * 2, steps=2, log=records.append, log_every=1)
    found = [{k: r[k] for k in ("skipped", "aux.0")} for r in events(records, "train")]
    assert found == [{"skipped": n, "aux.0": 1.0} for n in (0.0, 1.0)]
    assert not any(k.startswith(("aux.1", "key")) for k in events(records, "train")[0])


def test_processes_other_than_the_first_are_silent(step, monkeypatch):
    from meshdp.loop._sinks import Sinks

    said = []
    sinks = Sinks([said.append], speaks=False)
    sinks.write("note", 1, text="x")
    assert (said, sinks.ticks) == ([], False)


def test_a_terminal_gets_a_bar(step, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    run(step, 6, "console", log_every=2)
    text = sys.stdout.getvalue()
    assert "6/6" in text and "loss" in text and "step 2/6" not in text


def test_a_log_of_another_kind_is_refused(step):
    with pytest.raises(TypeError) as e:
        run(step, 1, ["console", "log.txt", 3])
    assert str(e.value) == (
        'log= takes "console", a path that ends in .jsonl, meshdp.TensorBoard(directory), an '
        "object with write(record), a function of a record, or a list of these, not:\n"
        "  log[1]: 'log.txt'\n"
        "  log[2]: 3"
    )


@pytest.fixture
def clock(monkeypatch):
    """The time and the seconds compiled, to be set."""
    now = {"time": 0.0, "compiled": 0.0}
    monkeypatch.setattr(_clock.time, "monotonic", lambda: now["time"])
    monkeypatch.setattr(_clock, "compile_seconds", lambda: now["compiled"])
    return now


def test_neither_compilation_nor_what_was_done_before_a_restart_counts(clock):
    made = _clock.Clock(start=50, steps=100)
    clock.update(time=30.0, compiled=29.0)
    made.finished(8)
    assert (made.left(), made.rate()) == (None, None)
    for t in (31.0, 32.0):
        clock["time"] = t
        made.finished(8)
    assert (made.left(), made.rate()) == (47.0, 8.0)  # 47 steps of a second
    clock.update(time=40.0, compiled=36.0)  # 7 s of 8 compiled something else
    made.finished(8)
    assert (made.left(), made.rate()) == (46.0, 8.0)
    made.pause()
    clock["time"] = 50.0  # an evaluation: counts for the time left alone
    made.finished(8)
    assert (made.left(), made.rate()) == (45.0 * 13 / 4, 8.0)
    assert made.interval()["step_seconds_p50"] == 1.0


def test_metrics_that_have_a_name_of_ours_get_another():
    @meshdp.distributed(mesh=meshdp.make_mesh())
    def step(n, batch):
        return n + 1, {"loss": batch.sum(), "step": batch.max(), "steps": batch.min()}

    records = []
    fit(
        step,
        jax.numpy.int32(0),
        [np.arange(8.0)],
        steps=1,
        evaluate=lambda state: {"time": 7.0, "best": 8.0, "event": 9.0},
        log=records.append,
    )
    (train,), (evaluation,) = events(records, "train"), events(records, "evaluation")
    assert (train["step"], train["steps"], train["loss"]) == (1, 1, 28.0)
    assert (train["metrics.step"], train["metrics.steps"]) == (7.0, 0.0)
    assert [evaluation[f"metrics.{k}"] for k in ("time", "best", "event")] == [7.0, 8.0, 9.0]
    assert evaluation["step"] == 1


def test_a_run_that_has_nothing_left_to_do_says_so(step):
    out = io.StringIO()
    run(step, 0, Console(file=out))
    assert out.getvalue().splitlines()[0].endswith("; all 0 steps are taken")
