"""The three softmaxes of the references: the same answer, and where the first of them fails."""

import jax
import numpy as np
import pytest

from jflash.reference import naive_softmax, online_softmax, safe_softmax

SAFE = (safe_softmax, online_softmax)


def softmax64(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("softmax", [naive_softmax, *SAFE])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4, 100)])
def test_agrees_with_float64(softmax, shape):
    x = 3 * np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    np.testing.assert_allclose(softmax(x), softmax64(x), rtol=2e-6)


def test_naive_overflows_where_the_others_do_not():
    x = np.array([1000.0, 1001.0, 1002.0], np.float32)
    assert np.isnan(naive_softmax(x)).all()
    for softmax in SAFE:
        np.testing.assert_allclose(softmax(x), softmax64(x), rtol=1e-6)
        np.testing.assert_allclose(softmax(-x), softmax64(-x), rtol=1e-6)


def test_online_softmax_makes_two_passes():
    x = np.zeros((4, 100), np.float32)
    scans = [e for e in jax.make_jaxpr(online_softmax)(x).jaxpr.eqns[0].params["jaxpr"].eqns if e.primitive.name == "scan"]
    assert len(scans) == 1
    assert scans[0].params["length"] == 99
