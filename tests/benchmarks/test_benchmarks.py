"""The benchmark programs, at tiny sizes."""

from __future__ import annotations

import csv
import sys

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("rich")

from checks import needs_compiler

from benchmarks import attention, plot, sparse
from benchmarks import machine_code as program

pytestmark = pytest.mark.whole


@needs_compiler
def test_machine_code(monkeypatch, tmp_path, capsys):
    def broken(q, k, v):
        raise NotImplementedError("no such kernel")

    output = tmp_path / "new" / "machine_code.csv"
    options = ["--gpu", "a100", "--head-dim", "64", "--length", "2048", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["program", *options])
    peers = program.peers
    monkeypatch.setattr(program, "peers", lambda causal: {"jflash": peers(causal)["jflash"], "broken": broken})
    program.main()
    with output.open(newline="") as file:
        lines = list(csv.DictReader(file))
    ours = [line for line in lines if line["attention"] == "jflash"]
    for causal in ("False", "True"):
        kernels = {line["kernel"] for line in ours if line["causal"] == causal}
        assert kernels == {"jflash_forward", "jflash_dkv", "jflash_dq"}
    assert sum(line["loop"] == "hot" for line in ours) == 6
    assert any(line["loop"] == "other" for line in ours), "the masked loop of a causal kernel"
    for line in ours:
        assert line["tensor_cores"] == "HMMA"
        assert 0 < float(line["peak_share"]) <= 1
    assert {line["kernel"] for line in lines if line["attention"] == "broken"} == {"NotImplementedError: no such kernel"}
    assert "compiled, not run" in capsys.readouterr().out


def test_attention_and_its_pictures(monkeypatch, tmp_path, capsys):
    """A path that disagrees and one that fails are told of and left out; the others have a line for each shape."""
    output = tmp_path / "new" / "attention.csv"
    options = ["--lengths", "32", "48", "--head-dims", "8", "--heads", "2", "--repeats", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["program", *options])
    paths = attention.jax_paths

    def with_bad_ones(causal):
        wrong = lambda q, k, v: 1.01 * jnp.asarray(paths(causal)["naive"](q, k, v))
        return {**paths(causal), "wrong": wrong, "broken": lambda q, k, v: q @ v}

    monkeypatch.setattr(attention, "jax_paths", with_bad_ones)
    attention.main()
    with output.open(newline="") as file:
        lines = list(csv.DictReader(file))
    for name in ("jflash", "jax.nn", "naive"):
        assert sum(line["attention"] == name for line in lines) == 2 * 2 * 2
    assert not {"wrong", "broken"} & {line["attention"] for line in lines}
    told = " ".join(capsys.readouterr().out.split())
    assert "wrong at Shape" in told
    assert "not the result of float64, not reported" in told
    assert "broken at Shape" in told
    for line in lines:
        assert float(line["milliseconds"]) > 0
        assert line["jax"] == jax.__version__
        assert float(line["times_as_fast_as_jax_nn"]) > 0

    monkeypatch.setattr(sys, "argv", ["program", str(output)])
    plot.main()
    assert {path.name for path in output.parent.glob("*.png")} == {
        f"attention_d8_{kind}_{direction}.png" for kind in ("full", "causal") for direction in ("forward", "backward")
    }


def test_flops_are_counted_as_the_field_does():
    shape = attention.Shape(2, 4096, 8, 64, "float16", causal=False, backward=False)
    assert shape.flops == 4 * 2 * 8 * 4096**2 * 64
    assert shape._replace(causal=True).flops == shape.flops / 2
    assert shape._replace(backward=True).flops == 3.5 * shape.flops


def test_sparse(monkeypatch, tmp_path, capsys):
    """Each pattern has a line for each path; what is not jax.nn's is not reported."""
    output = tmp_path / "sparse.csv"
    options = ["--length", "256", "--heads", "2", "--head-dim", "8", "--repeats", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["program", *options])
    sparse.main()
    with output.open(newline="") as file:
        lines = list(csv.DictReader(file))
    own = [line for line in lines if line["attention"] == "jflash"]
    assert [line["pattern"] for line in own[::2]] == list(sparse.patterns(256))
    for line in own:
        assert float(line["visible_percent"]) <= float(line["visited_percent"]) <= 100
        assert float(line["times_its_share_of_full"]) > 0
    assert "16 interleaved documents" in capsys.readouterr().out

    patterns = sparse.patterns
    wrong = lambda length: {"wrong": patterns(length)["prefix-LM"]._replace(visible=lambda i, j: j <= i)}
    monkeypatch.setattr(sparse, "patterns", wrong)
    with pytest.raises(AssertionError, match="jflash, wrong, forward: "):
        sparse.main()
