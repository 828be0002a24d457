"""The benchmark programs, at tiny sizes."""

from __future__ import annotations

import csv
import sys

import pytest

pytest.importorskip("rich")

from benchmarks import machine_code as program
from jflash import machine_code

MISSING = machine_code.missing_wheels()
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


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
