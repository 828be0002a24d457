"""The package as its user meets it: public names, the README's example, the self-check, and which GPU gets what."""

import dataclasses
import logging
import pathlib
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import pytest

from jflash import __main__ as self_check
from jflash import attention
from jflash.launch import gpu
from jflash.proof import accuracy
from jflash.proof.cases import Case

ROOT = pathlib.Path(__file__).parents[1]


def test_the_examples_of_the_readme_run(quickly_compiled):
    """With a fifth of their lengths."""
    shorter = lambda length: "256" if length[0] == "2048" else str(int(length[0]) // 5)  # eight devices share these
    text = re.sub(r"\b(250|256|300|512|600|700|1000|2048)\b", shorter, (ROOT / "README.md").read_text())
    first, *others = re.findall(r"```python\n(.*?)```", text, re.S)
    names = {}
    exec(first, names)
    chex.assert_shape([names["o"], names["dq"]], (2, 200, 8, 64))
    chex.assert_shape([names["dk"], names["dv"]], (2, 200, 2, 64))
    chex.assert_shape(names["lse"], (2, 8, 200))
    chex.assert_type([names["o"], names["dq"], names["lse"]], [jnp.bfloat16, jnp.bfloat16, jnp.float32])
    chex.assert_tree_all_finite([names[name] for name in ("o", "lse", "dq", "dk", "dv")])
    assert others
    for example in others:
        exec(example, names)
    chex.assert_shape(names["o"], (2, 200, 8, 64))
    chex.assert_tree_all_finite([names["o"], names["dtable"]])


def test_importing_jflash_needs_only_jax_and_numpy():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in set(
            "flax equinox optax orbax chex hypothesis jaxtyping beartype rich matplotlib platformdirs".split()
        ):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import jflash, jflash.reference, jflash.proof.accuracy, jflash.machine_code
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_self_check_says_yes_and_no(capsys, monkeypatch, quickly_compiled):
    monkeypatch.setattr(sys, "argv", ["jflash"])
    monkeypatch.setattr(self_check, "SELF_TEST", (Case(20, 30, head_dim=8), Case(9, 9, head_dim=8, dtype="bfloat16")))
    assert self_check.main() == 0
    assert capsys.readouterr().out.endswith("all 2 cases agree\n")

    right = accuracy.program

    def slightly_wrong(*args, **how):
        compiled, *rest = right(*args, **how)
        if how.get("implementation") == "naive":
            return compiled, *rest
        return Program(compiled), *rest

    monkeypatch.setattr(accuracy, "program", slightly_wrong)
    assert self_check.main() == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("2 of 2 cases disagree: 20x30 d8")
    assert "!" in printed


@dataclasses.dataclass
class Program:
    """A compiled program whose dk is a tenth off."""

    compiled: jax.stages.Compiled

    def __call__(self, *args, **parameters):
        got = self.compiled(*args, **parameters)
        return got._replace(dk=got.dk * 1.1)

    def memory_analysis(self):
        return self.compiled.memory_analysis()


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("NVIDIA A100-SXM4-80GB", "ampere"),
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("NVIDIA B200", "blackwell"),
        ("NVIDIA L4", "small"),
        ("NVIDIA RTX A1000", "small"),  # no A100, though it is spelled with one
        ("NVIDIA GeForce RTX 4090", "small"),
        ("some GPU of the future", "small"),
        (None, "small"),
    ],
)
def test_families(kind, family):
    assert gpu.family(kind) == family


def test_a_gpu_that_is_too_old_says_so_once(monkeypatch, caplog):
    device = type("Device", (), {"compute_capability": "7.5", "device_kind": "Tesla T4", "platform": "gpu"})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    q = jnp.ones((3, 1, 4))
    with caplog.at_level(logging.WARNING, logger="jflash"):
        attention(q, q, q)
        attention(q, q, q, causal=True)
    assert [r.getMessage() for r in caplog.records] == [
        'attention runs as implementation="xla" on this GPU: Triton needs compute capability 8.0, this GPU has 7.5'
    ]


def test_no_word_about_what_the_kernels_cannot_take_where_there_is_no_gpu(caplog):
    q = jnp.ones((3, 1, 300))
    with caplog.at_level(logging.WARNING, logger="jflash"):
        attention(q, q, q)
    assert not caplog.records
