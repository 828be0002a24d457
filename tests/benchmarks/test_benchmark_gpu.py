"""The one command for a GPU: all of it at tiny sizes on the CPU, what it does with failures and with too little time, goals."""

from __future__ import annotations

import csv
import dataclasses
import os
import signal

import jax
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import jflash
from benchmarks import attention, goals, gpu, measure, plot
from benchmarks.attention import Shape
from jflash.launch import gpu as gpu_at_hand
from jflash.launch import table as launch_table
from jflash.launch.table import Entry, Key, Launch
from jflash.proof import accuracy
from jflash.proof.cases import CASES, SELF_TEST

pytestmark = pytest.mark.whole

SHAPE = Shape(2, 8192, 32, 64, "bfloat16", causal=True, backward=False)
ENTRY = Entry(Key("forward", 32, 8, 8, "plain", 32, 32), Launch(32, 32, 4, 1), "measured", "a GPU", "2026-11-30", "jax")


def lines(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def quick(monkeypatch):
    """A tiny plan, of which nothing is compiled: every check agrees, and times are made up."""
    verdict = accuracy.Verdict("o", 1e-7, 1e-6)
    monkeypatch.setattr(accuracy, "run", lambda *args, **how: None)
    monkeypatch.setattr(accuracy, "exact", lambda *args: None)
    monkeypatch.setattr(accuracy, "verdicts", lambda *args: [verdict, verdict._replace(name="dq")])
    monkeypatch.setattr(attention, "measure", lambda shape, *args: [line(shape, "jflash", 1.0)])
    return gpu.tiny()


def line(shape, name, milliseconds):
    known = {"milliseconds": milliseconds, "TFLOPS": 1e-9 * shape.flops / milliseconds, "temporary_MiB": 1.0}
    return {"attention": name, **shape._asdict(), **known, "device": "cpu", "jax": jax.__version__}


# ------------------------------------------------------------------------------------------------------- the command


def test_all_of_it_at_tiny_sizes(tmp_path, capsys):
    folder = tmp_path / "new"
    assert gpu.main(["--tiny", "--out", str(folder), "--minutes", "10"]) == 0
    checks = lines(folder / "checks.csv")
    assert {(line["dtype"], line["implementation"]) for line in checks} == {("float32", "interpret"), ("float16", "interpret")}
    assert {line["output"] for line in checks} == {"o", "lse", "dq", "dk", "dv", "['sinks']"}
    assert all(float(line["error"]) <= float(line["tolerance"]) and line["agrees"] == "True" for line in checks)
    for name, shapes in gpu.tiny().measured.items():
        measured = [line for line in lines(folder / f"{name}.csv") if line["attention"] == "jflash"]
        assert [int(line["length"]) for line in measured] == [shape.length for shape in shapes]
    summary = (folder / "summary.md").read_text()
    assert "2 cases, 11 outputs and gradients; no cases disagree or fail." in summary
    assert "| forward, 2 x 32, 2 heads of 8, causal, float32 |" in summary
    assert "Not judged: they are for H100 and H200, this is cpu." in summary
    assert "RuntimeError: tune() measures on an NVIDIA GPU" in summary
    for direction in ("forward", "backward"):
        name = f"tokens_16k_d8_causal_{direction}.png"
        assert f"![{name}]({name})" in summary
        assert (folder / name).stat().st_size > 10_000
    assert "jflash" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu_at_hand, "is_default", lambda: False)
    for arguments, said in ([], "a GPU that runs the Triton kernels is needed: JAX finds none"), (["--tiny"], "needs --out"):
        with pytest.raises(SystemExit, match="2"):
            gpu.main(arguments)
        assert said in capsys.readouterr().err


def test_too_old_a_gpu_and_no_time(capsys, monkeypatch):
    monkeypatch.setattr(gpu_at_hand, "is_default", lambda: True)
    monkeypatch.setattr(gpu_at_hand, "too_old", lambda: "it is a V100")
    for arguments, said in ([], "is needed: it is a V100"), (["--minutes", "0"], "--minutes must be positive, got 0.0"):
        with pytest.raises(SystemExit, match="2"):
            gpu.main(arguments)
        assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------- what fails, and what is out of time


def test_what_is_wrong_is_reported_and_stops_nothing(quick, tmp_path, monkeypatch):
    def run(case, arrays, implementation, precision):
        if case.dtype == "float16" and implementation == "interpret":
            raise NotImplementedError("no such kernel\nat all")

    monkeypatch.setattr(accuracy, "run", run)
    verdicts = [accuracy.Verdict("o", 1e-7, 1e-6), accuracy.Verdict("dq", 0.25, 1e-5)]
    monkeypatch.setattr(accuracy, "verdicts", lambda *args: verdicts)
    assert gpu.run(quick, tmp_path, 60) == 1
    right, wrong = [line for line in lines(tmp_path / "checks.csv") if line["dtype"] == "float32"]
    assert (right["agrees"], wrong["agrees"], wrong["output"], wrong["error"]) == ("True", "False", "dq", "0.25")
    summary = (tmp_path / "summary.md").read_text()
    assert "2 cases, 3 outputs and gradients; 2 cases disagree or fail." in summary
    assert "| 20x20 d8 causal | highest | dq | 0.25 | 1e-05 |  |" in summary
    assert "NotImplementedError: no such kernel |" in summary
    assert lines(tmp_path / "tokens_16k.csv"), "the rest went on"


def test_a_path_without_a_result_is_a_failure_only_where_it_is_jflash(quick, tmp_path, monkeypatch):
    def measured(shape, repeats, names, note):
        if shape.length == 16:
            note("naive at this shape: not the result of float64, not reported")
            return [line(shape, "jflash", 1.0)]
        if shape.length == 32:
            raise MemoryError("in the middle")
        return [line(shape, "naive", 1.0)]

    monkeypatch.setattr(attention, "measure", measured)
    assert gpu.run(dataclasses.replace(quick, measured={"headline": quick.measured["headline"]}), tmp_path, 60) == 0
    assert gpu.run(quick, tmp_path, 60) == 1
    summary = (tmp_path / "summary.md").read_text()
    assert "\n- naive at this shape: not the result of float64" in summary
    assert summary.count("FAILED: no times at Shape(batch=2, length=32,") == 2
    assert summary.count("FAILED: jflash has no result at Shape(batch=1, length=64,") == 2


def test_what_is_tuned_is_kept_and_checked(quick, tmp_path, monkeypatch):
    budgets = []

    def tune(q, k, v, causal, minutes):
        budgets.append(minutes)
        return {"forward": ENTRY}

    monkeypatch.setattr(jflash, "tune", tune)
    assert gpu.run(quick, tmp_path, 100) == 0
    assert 55 < 60 * budgets[0] <= 60, "what the checks leave of their time is the tuner's"
    (entry,) = launch_table.read((tmp_path / "tuned.json").read_text(), "tuned.json")
    assert dataclasses.replace(entry, table=None) == ENTRY
    assert {line["case"] for line in lines(tmp_path / "tuned.csv")} == {"300x300 d8 causal"}
    assert f"- {ENTRY}" in (tmp_path / "summary.md").read_text()


def test_a_tuner_that_fails_on_a_gpu_is_a_failure(quick, tmp_path, monkeypatch):
    def tune(*args, **how):
        raise error

    monkeypatch.setattr(jflash, "tune", tune)
    monkeypatch.setattr(gpu_at_hand, "is_default", lambda: True)
    for error, status in (RuntimeError("the compiler takes no launch"), 1), (ModuleNotFoundError("install ptxas"), 0):
        assert gpu.run(quick, tmp_path, 60) == status
        assert f"{type(error).__name__}: {error}" in (tmp_path / "summary.md").read_text()


def test_nothing_is_begun_when_the_time_is_up(quick, tmp_path):
    assert gpu.run(quick, tmp_path, 1e-9) == 0
    summary = (tmp_path / "summary.md").read_text()
    for said in (
        "2 of 2 checks are left out: the time was up",
        "1 of 1 shapes are not tuned: the time was up",
        "1 of 1 shapes of headline are left out: the time was up",
        "4 of 4 shapes of tokens_16k are left out: the time was up",
        "Nothing was measured.",
    ):
        assert said in summary


def test_a_signal_leaves_a_summary_of_what_there_is(quick, tmp_path, monkeypatch):
    def measured(shape, *args):
        if shape.length == 64:
            os.kill(os.getpid(), signal.SIGTERM)
        return [line(shape, "jflash", 1.0)]

    monkeypatch.setattr(attention, "measure", measured)
    before = signal.signal(signal.SIGTERM, gpu.stop)
    try:
        assert gpu.run(quick, tmp_path, 60) == 130
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "a second one does not disturb the summary"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [line["length"] for line in lines(tmp_path / "tokens_16k.csv")] == ["32", "32"]
    summary = (tmp_path / "summary.md").read_text()
    assert "stopped before the end" in summary
    assert "| forward, 2 x 32, 2 heads of 8, causal, float32 |" in summary


# --------------------------------------------------------------------------------------------------------- the plan


def test_every_case_is_checked_in_each_dtype_and_first_in_its_own():
    plan = gpu.full()
    assert plan.implementation == "triton"
    cases = [check.case for check in plan.checks]
    own = {*SELF_TEST, *CASES}
    assert set(cases[: len(own)]) == own
    for dtype in ("float16", "bfloat16", "float32"):
        assert {dataclasses.replace(case, dtype=dtype) for case in CASES} <= set(cases)
    assert len(set(plan.checks)) == len(plan.checks)
    assert {check.precision for check in plan.checks if check.case.dtype == "float32"} == {"highest", None}
    tokens = plan.measured["tokens_16k"]
    assert len(tokens) == 3 * 3 * 2 * 2
    for shape in tokens:
        assert (shape.batch * shape.length, shape.heads * shape.head_dim) == (16384, 2048)
    assert {(shape.head_dim, shape.length) for shape in plan.tuned} == {(64, 4096), (128, 4096), (256, 4096)}


# --------------------------------------------------------------------------------------------------------- the goals


def test_the_backward_alone_is_what_both_take_beyond_the_forward():
    both, other = SHAPE._replace(backward=True), SHAPE._replace(length=4096)
    taken = [line(SHAPE, "jflash", 2.0), line(both, "jflash", 6.0), line(both, "torch", 5.0), line(other, "torch", 0.5)]
    forward, backward, of_other = goals.side_by_side(taken)
    operations = 4 * 2 * 32 * 8192**2 * 64 / 2 * 1e-12
    assert forward.tflops == pytest.approx({"jflash": operations / 2e-3})
    assert backward.tflops == pytest.approx({"jflash": 2.5 * operations / 4e-3}), "of torch there is no forward"
    assert of_other.tflops == pytest.approx({"torch": operations / 4 / 0.5e-3})
    assert goals.side_by_side([line(SHAPE, "jflash", 2.0), line(both, "jflash", 1.9)]) == [forward], "noise is no rate"


@pytest.mark.parametrize(
    ("shape", "tflops", "expected"),
    [
        (SHAPE, {"jflash": 360.0}, [(1.25 * 287, True)]),
        (SHAPE, {"jflash": 358.0, "cuDNN": 514.0}, [(1.25 * 287, False), (0.65 * 514, True)]),
        (SHAPE._replace(backward=True), {"jflash": 281.0, "cuDNN": 440.0}, [(1.15 * 244, True), (0.65 * 440, False)]),
        (SHAPE._replace(heads=16, head_dim=128, causal=False), {"jflash": 1.0}, [(1.25 * 394, False)]),
        (SHAPE._replace(heads=8, head_dim=256), {"jflash": 401.0, "cuDNN": 600.0}, [(0.65 * 600, True)]),
        (SHAPE._replace(heads=8, dtype="float16"), {"jflash": 360.0}, []),  # not what the published figures are for
        (SHAPE._replace(batch=8, length=2048), {"jflash": 360.0, "cuDNN": 400.0}, []),
        (SHAPE, {"cuDNN": 514.0}, []),
    ],
)
def test_goals(shape, tflops, expected):
    judged = list(goals.goals(goals.Rates(shape, tflops)))
    assert [(goal.least, goal.met) for goal in judged] == [(pytest.approx(least), met) for least, met in expected]


def test_goals_are_for_two_gpus():
    assert goals.judged_on("NVIDIA H100 80GB HBM3")
    assert goals.judged_on("NVIDIA H200")
    assert not goals.judged_on("NVIDIA A100-SXM4-80GB")


def test_goals_in_the_summary(quick, tmp_path, monkeypatch):
    milliseconds = {"jflash": 2.0, "cuDNN": 1.0}
    monkeypatch.setattr(attention, "measure", lambda shape, *args: [line(shape, *item) for item in milliseconds.items()])
    monkeypatch.setattr(goals, "judged_on", lambda kind: True)
    assert gpu.run(dataclasses.replace(quick, measured={"headline": [SHAPE]}), tmp_path, 60) == 0, "a missed goal is no fault"
    summary = (tmp_path / "summary.md").read_text()
    assert "0 of 2 are met." in summary
    row = "forward, 2 x 8192, 32 heads of 64, causal, bfloat16"
    assert f"| {row} | 1.25 of tokamax's published 287 | 359 | 275 | no |" in summary
    assert f"| {row} | 275 | 550 | 0.5 |" in summary


# ------------------------------------------------------------------------------------------- the pictures, the timing


def test_a_panel_without_a_figure_is_drawn(tmp_path):
    """Attention that needs no memory beside its results, or does not say how much: a logarithm has nothing to show."""
    kinds = [{**line(SHAPE, "jflash", 1.0), "temporary_MiB": 0.0}, {**line(SHAPE, "torch", 2.0), "temporary_MiB": None}]
    with measure.csv_lines(tmp_path / "x.csv") as add:
        for one in kinds:
            add(one)
    assert plot.draw_all(tmp_path / "x.csv") == [tmp_path / "x_d64_causal_forward.png"]


def test_a_title_tells_what_all_lengths_share():
    at = lambda batch, length: {name: str(x) for name, x in line(SHAPE._replace(batch=batch, length=length), "x", 1.0).items()}
    assert "causal, forward: bfloat16, cpu" in plot.title([at(2, 8192), at(4, 4096)])
    assert "16384 tokens, 32 heads of 64" in plot.title([at(2, 8192), at(4, 4096)])
    assert "batch 2, 32 heads of 64" in plot.title([at(2, 8192), at(2, 4096)])


def test_calls_are_queued_until_they_last_and_waited_for_together(monkeypatch):
    now, met, waits = [0.0], [], []

    def program(*arguments):
        met.append(arguments)
        now[0] += 0.004

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    waited = lambda result: waits.append(len(met))
    assert measure.median_seconds({"program": program}, 2, (0,), (1,), wait=waited) == {"program": pytest.approx(0.004)}
    assert waits == [1, 2, 3, 6, 7, 10], "two to warm up; then, twice, one that does not count and three that last 10 ms"
    assert [argument for (argument,) in met] == [0, 1, 0, 1, 0, 1, 1, 0, 1, 0], "in turn"
